"""GET /v1/overview: everything at a glance, made and encoded once however many watch."""

import msgspec
from fastapi import APIRouter, Request, Response

from refitd.api.context import ServiceOf
from refitd.api.glance import Seen, glance
from refitd.api.health import faults_now
from refitd.api.present import present_engine
from refitd.rollout.targets import Targets
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Faults, Overview, RunGlance

router = APIRouter(prefix="/v1", tags=["overview"])


class Cached:
    """The last overview, in JSON. It is good until the store changes again, or something else goes wrong.

    Only its instant is that of each answer: it tells whoever looks how old what he sees is, and how long an engine has
    been away, and nothing changes while a service is idle.
    """

    def __init__(self, *, wants_token: bool = False) -> None:
        """`wants_token` is that of every answer."""
        self._wants_token = wants_token
        self._as_of = (-1, Faults())
        self._before, self._after = b"", b""  # the instant

    def json(self, store: Store, targets: Targets, faults: Faults) -> bytes:
        """The overview as it is now."""
        now = (store.changed.count, faults)
        if self._as_of != now:
            overview = overview_of(store, targets, faults, wants_token=self._wants_token)
            at = msgspec.json.encode(overview.at)  # the first that stands in it
            self._before, _, self._after = msgspec.json.encode(overview).partition(at)
            self._as_of = now
        return self._before + msgspec.json.encode(store.clock.now()) + self._after


@router.get("/overview", response_class=Response, responses={200: {"model": Overview}})
async def overview(service: ServiceOf, request: Request) -> Response:
    """Each run with a sentence that says whether its engines are on the newest version; all engines; counts."""
    cached: Cached = request.app.state.overview
    faults = await faults_now(service.store)  # a full disk is when somebody looks: it is told, and hides nothing else
    return Response(cached.json(service.store, service.targets, faults), media_type="application/json")


def overview_of(store: Store, targets: Targets, faults: Faults, *, wants_token: bool) -> Overview:
    """Look at everything.

    Args:
        store: what the service knows.
        targets: what engines are to serve.
        faults: what is wrong with the service.
        wants_token: whether anything is closed to who has no token.
    """
    return Overview(
        at=store.clock.now(),
        event=store.last_event,
        strategy=targets.strategy.name,
        faults=faults,
        wants_token=wants_token,
        runs=[glance_at(store, targets, run) for run in runs_of(store)],
        engines=[present_engine(engine, store, targets) for _, engine in sorted(store.engines.items())],
        versions=_count(store),
        held_bytes=sum(version.bytes or 0 for version in store.versions.values()),
    )


def runs_of(store: Store) -> list[str]:
    """The runs that anything is known of; those that are closed come last."""
    runs = set(store.runs_with_versions) | store.runs.followed_since.keys()
    return sorted(runs, key=lambda run: (run in store.runs.closed, run))


def glance_at(store: Store, targets: Targets, run: str) -> RunGlance:
    """One run."""
    engines = store.engines_of(run)
    return glance(
        Seen(
            run=run,
            target=targets.of_run(run).target,
            versions=[version.as_judged for version in store.published_of(run)],
            engines=engines,
            rollout=store.rollouts.get(run),
            strategy=targets.strategy,
            others=[] if engines else _others(store),
            closed=store.runs.closed.keys(),
            closed_at=store.runs.closed.get(run),
        )
    )


def _others(store: Store) -> list[EngineRecord]:
    """The engines that could follow a run that has none: first those that no other run would lose."""
    closed = store.runs.closed
    return sorted(store.engines.values(), key=lambda e: (e.run is not None and e.run not in closed, e.id))


def _count(store: Store) -> dict[VersionState, int]:
    counts = dict.fromkeys(VersionState, 0)
    for version in store.versions.values():
        counts[version.state] += 1
    return counts | {VersionState.DELETED: len(store.gone)}
