"""Routes that say whether requests may go to an engine: for routers, readiness probes and load balancers.

They answer from memory, wait for nothing, and write nothing. A shut gate is an answer and no problem: it is not counted
among the API's errors.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Response

from refitd.api.context import Service, ServiceOf, engine_id_of
from refitd.explain.present import steps_behind
from refitd.policy.traffic import Demand
from refitd_client.contract.naming import parse_version_id

router = APIRouter(prefix="/v1", tags=["engines"])


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


@router.get("/gate", response_model=EngineGate, responses=_SHUT)
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
