"""Routes of engines: the fleet."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response

from refitd.api.context import Service, ServiceOf, engine_id_of
from refitd.api.overview import Fragments
from refitd.engine.address import AddressRefusedError, check_url, host_of
from refitd.engine.wire import refused
from refitd.explain.present import present_engine, steps_behind
from refitd.policy.roster import guard_of, move
from refitd.policy.traffic import Demand
from refitd.problem import ProblemError, Slug
from refitd.state.records import EngineRecord
from refitd_client.contract.naming import InvalidNameError, check_run, parse_version_id
from refitd_client.contract.plugin import Receivers
from refitd_client.contract.wire import Engine, Move, NewEngine, Page

router = APIRouter(prefix="/v1/engines", tags=["engines"])
receivers_route = APIRouter(prefix="/v1/receivers", tags=["engines"])


@router.get("", response_model=Page[Engine])
async def list_engines(
    service: ServiceOf,
    request: Request,
    run: str | None = None,
    serves: Annotated[str | None, Query(pattern=r"^(>=)?[0-9]{1,13}$")] = None,
) -> Response:
    """All engines; with `run` those that follow it; with `serves` those that answer with a version now.

    `serves=120` means step 120, `serves=>=120` (in a URL `serves=%3E%3D120`) that step or a later one, of the newest
    generation of the engine's run. Such an engine's gate is open, whatever its run's target is.
    """
    demand = None
    if serves is not None:
        demand = Demand(run=run, step=int(serves.removeprefix(">=")), or_later=serves.startswith(">="))
    found = [
        engine
        for _, engine in sorted(service.store.engines.items())
        if (run is None or engine.run == run) and (demand is None or service.targets.shut(engine, demand) is None)
    ]
    fragments: Fragments = request.app.state.fragments
    items = fragments.of(found, service.store, service.targets)
    return Response(msgspec.json.encode(Page(items=items)), media_type="application/json")


@router.post("", status_code=201)
async def add_engine(engine: NewEngine, service: ServiceOf) -> Engine:
    """Take an engine in: it is brought to its run's target at once. 403 where its host is not on the allow list."""
    try:
        host = host_of(check_url(engine.url))
    except AddressRefusedError as error:
        raise ProblemError(Slug.BAD_ENGINE_URL, str(error)) from error
    if (reason := await refused(host, guard_of(service.values.operator_hosts, service.store.engines))) is not None:
        raise ProblemError(Slug.ENGINE_NOT_ALLOWED, reason)
    engine_id = service.fleet.add(engine)
    await service.store.durable()
    return _present(service, engine_id)


@router.post("/move")
async def move_engines(order: Move, service: ServiceOf) -> Page[Engine]:
    """Have engines follow another run from now on: all of them, or none where one cannot be moved.

    They go on serving what they serve until they have loaded that run's target; a load that is under way comes to its
    end. 409 where one follows a run that is not closed, unless `insist` says so: that run would lose it. The run need
    not have published yet. A move outlives a restart of the service, and holds until the engines file, the settings or
    another move name another run for the engine.
    """
    run = _checked_run(order.run)
    meant = [engine_id_of(name, service.store) for name in order.engines]
    records = [_record(service, engine_id) for engine_id in meant]
    _check_moves(service, run, records, insist=order.insist)
    for record in records:
        move(service.store, record, run)
    await service.store.durable()
    return Page(items=[_present(service, engine_id) for engine_id in meant])


@receivers_route.get("")
async def receivers(run: str, service: ServiceOf) -> Receivers:
    """The ranks of a run's engines that can receive weights over a process group, as of the last look at each engine.

    A trainer asks for them before it publishes, to choose a transport by what is there.
    """
    there = [engine for engine in service.store.engines_of(_checked_run(run)) if engine.seen.receivers]
    others = [engine for engine in service.store.engines_of(run) if not engine.seen.receivers]
    return Receivers(
        receivers=[replace(each, engine=engine.id) for engine in there for each in engine.seen.receivers],
        others=[engine.id for engine in others],
    )


# An engine is named by its id or by its URL, which has slashes.
@router.get("/{engine_id:path}")
async def get_engine(engine_id: str, service: ServiceOf) -> Engine:
    """One engine, by its id or its URL."""
    return _present(service, engine_id_of(engine_id, service.store))


@router.delete("/{engine_id:path}", status_code=204, response_class=Response)
async def remove_engine(engine_id: str, service: ServiceOf) -> None:
    """Let go of an engine. What it serves it goes on serving."""
    service.fleet.remove(engine_id_of(engine_id, service.store))
    await service.store.durable()


@router.post("/{engine_id:path}/resync", status_code=202)
async def resync(engine_id: str, service: ServiceOf) -> Engine:
    """Load an engine again, whatever it claims to serve: now, or when it is reachable. This ends a quarantine."""
    meant = engine_id_of(engine_id, service.store)
    service.fleet.resync(meant)
    await service.store.durable()
    return _present(service, meant)


def _checked_run(run: str) -> str:
    try:
        return check_run(run)
    except InvalidNameError as error:
        raise ProblemError(Slug.BAD_NAME, str(error)) from error


def _check_moves(service: Service, run: str, engines: Sequence[EngineRecord], *, insist: bool) -> None:
    """A run that is not closed keeps its engines, unless the request insists."""
    closed = service.store.runs.closed
    kept = [e for e in engines if e.run is not None and e.run != run and e.run not in closed]
    if kept and not insist:
        told = ", ".join(f"{engine.id} follows {engine.run}" for engine in kept)
        command = f"refitd engines move {' '.join(engine.id for engine in engines)} --run {run} --yes"
        raise ProblemError(
            Slug.RUN_OPEN,
            f"{told}, which is not closed and would lose it: close a run that has ended ('refitd runs close "
            f"{kept[0].run}'), or insist ('{command}', 'insist' in the API)",
        )


def _record(service: Service, engine_id: str) -> EngineRecord:
    record = service.store.engines.get(engine_id)
    if record is None:
        raise ProblemError(Slug.UNKNOWN_ENGINE, f"no engine {engine_id}: 'refitd engines' lists what there is")
    return record


def _present(service: Service, engine_id: str) -> Engine:
    return present_engine(_record(service, engine_id), service.store, service.targets)


gate_route = APIRouter(prefix="/v1", tags=["engines"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGate:
    """Whether requests may go to an engine (`open`), and if not, why. `behind` is as in `Engine`."""

    id: str
    open: bool
    reason: str | None = None
    version: str | None = None
    step: int | None = None
    behind: int | None = None


_SHUT: dict[int | str, dict[str, Any]] = {
    503: {"model": EngineGate, "description": "No requests may go to it, for the reason given"}
}
_UNCACHED = {"Cache-Control": "no-store"}  # the next answer may be another
MaxBehind = Annotated[int, Query(ge=0)]


@gate_route.get("/gate", response_model=EngineGate, responses=_SHUT)
async def gate(
    service: ServiceOf,
    host: Annotated[str, Header()],
    engine: str | None = None,
    run: str | None = None,
    max_behind: MaxBehind = 0,
) -> Response:
    """Whether requests may go to an engine: 200 if they may, 503 with a reason if not.

    They may if the engine is proved to serve a version of the newest generation of its run, at most `max_behind` of the
    trainer's steps behind the run's target, and takes requests now. With `run`, the engine has to follow that run. The
    gate is shut while an engine is new, updated, paused, TAINTED, QUARANTINED, CONTESTED, does not answer, has yet to
    answer after a start of the service, serves a barred version, or is not known here.

    `engine` is an id or a URL. Without it the engine is the one whose id the `Host` header names, such as
    `gpu-1:30000`: for load balancers that ask one path for all endpoints and let each have a host name, as Envoy's
    health checks do.
    """
    return _answer(service, host if engine is None else engine, Demand(run=run, max_behind=max_behind))


def _answer(service: Service, name: str, demand: Demand) -> Response:
    engine = service.store.engines.get(engine_id_of(name, service.store))
    if engine is None:
        return _response(EngineGate(id=name, open=False, reason=f"there is no engine {name}"))
    why = service.targets.shut(engine, demand)
    serving = parse_version_id(engine.serving or "")
    return _response(
        EngineGate(
            id=engine.id,
            open=why is None,
            reason=None if why is None else f"{engine.id} {why}",
            version=engine.serving,
            step=None if serving is None else serving[1].step,
            behind=steps_behind(engine, service.targets),
        )
    )


def _response(found: EngineGate) -> Response:
    status = 200 if found.open else 503
    return Response(msgspec.json.encode(found), status, _UNCACHED, media_type="application/json")
