"""GET /v1/overview: everything at a glance, made and encoded once however many watch."""

import msgspec
from fastapi import APIRouter, Request, Response

from refitd.ledger import Ledger
from refitd.rollout.record import EngineRecord
from refitd.surface.context import ServiceOf
from refitd.surface.glance import Seen, glance
from refitd.surface.health import faults_now
from refitd.surface.present import present_engine
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Faults, Overview, RunGlance

router = APIRouter(prefix="/v1", tags=["overview"])


class Cached:
    """The last overview, in JSON. It is good until the ledger's bell rings again, or something else goes wrong.

    Only its instant is that of each answer: it tells whoever looks how old what he sees is, and how long an engine has
    been away, and nothing rings while a service is idle.
    """

    def __init__(self, *, wants_token: bool = False) -> None:
        """`wants_token` is that of every answer."""
        self._wants_token = wants_token
        self._as_of = (-1, Faults())
        self._before, self._after = b"", b""  # the instant

    def json(self, ledger: Ledger, faults: Faults) -> bytes:
        """The overview as it is now."""
        now = (ledger.bell.count, faults)
        if self._as_of != now:
            overview = overview_of(ledger, faults, wants_token=self._wants_token)
            at = msgspec.json.encode(overview.at)  # the first that stands in it
            self._before, _, self._after = msgspec.json.encode(overview).partition(at)
            self._as_of = now
        return self._before + msgspec.json.encode(ledger.clock.now()) + self._after


@router.get("/overview", response_class=Response, responses={200: {"model": Overview}})
async def overview(service: ServiceOf, request: Request) -> Response:
    """Each run with a sentence that says whether its engines are on the newest version; all engines; counts."""
    cached: Cached = request.app.state.overview
    faults = await faults_now(service.ledger)  # a full disk is when somebody looks: it is told, and hides nothing else
    return Response(cached.json(service.ledger, faults), media_type="application/json")


def overview_of(ledger: Ledger, faults: Faults, *, wants_token: bool) -> Overview:
    """Look at everything.

    Args:
        ledger: what the service knows.
        faults: what is wrong with the service.
        wants_token: whether anything is closed to who has no token.
    """
    return Overview(
        at=ledger.clock.now(),
        event=ledger.last_event,
        strategy=ledger.strategy.name,
        faults=faults,
        wants_token=wants_token,
        runs=[glance_at(ledger, run) for run in runs_of(ledger)],
        engines=[present_engine(engine, ledger) for _, engine in sorted(ledger.engines.items())],
        versions=_count(ledger),
        held_bytes=sum(version.bytes or 0 for version in ledger.versions.values()),
    )


def runs_of(ledger: Ledger) -> list[str]:
    """The runs that anything is known of; those that are closed come last."""
    runs = set(ledger.runs_with_versions) | ledger.runs.followed_since.keys()
    return sorted(runs, key=lambda run: (run in ledger.runs.closed, run))


def glance_at(ledger: Ledger, run: str) -> RunGlance:
    """One run."""
    engines = ledger.engines_of(run)
    return glance(
        Seen(
            run=run,
            target=ledger.goals(run).target,
            versions=ledger.versions_of(run),
            engines=engines,
            rollout=ledger.rollouts.get(run),
            strategy=ledger.strategy,
            others=[] if engines else _others(ledger),
            closed=ledger.runs.closed.keys(),
            closed_at=ledger.runs.closed.get(run),
        )
    )


def _others(ledger: Ledger) -> list[EngineRecord]:
    """The engines that could follow a run that has none: first those that no other run would lose."""
    closed = ledger.runs.closed
    return sorted(ledger.engines.values(), key=lambda e: (e.run is not None and e.run not in closed, e.id))


def _count(ledger: Ledger) -> dict[VersionState, int]:
    counts = dict.fromkeys(VersionState, 0)
    for version in ledger.versions.values():
        counts[version.state] += 1
    return counts | {VersionState.DELETED: len(ledger.gone)}
