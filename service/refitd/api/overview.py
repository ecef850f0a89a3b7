"""GET /v1/overview: each run's standing in sentences, all engines, counts; made and encoded once for all readers.

The dashboard, `refitd top` and `refitd status` show these very words, so that all say the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from refitd.api.context import ServiceOf
from refitd.api.health import faults_now
from refitd.explain.present import present_engine, why_now
from refitd.explain.run import glance_at, runs_of
from refitd.state.faults import FollowedUpstream
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Faults, Overview


class Fragments:
    """Engines in JSON, each encoded again when it has changed: of a thousand, few change between two reads.

    The last JSON of each engine, and what it was made of: objects none of which ever changes in itself, and why the
    engine is where it is, which may also change with its host and the upstream.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[object, ...], str | None, msgspec.Raw]] = {}

    def of(self, engines: Iterable[EngineRecord], store: Store, targets: Targets) -> list[msgspec.Raw]:
        """Return engines as the API shows them, in the order given."""
        if len(self._made) > 2 * len(store.engines):
            self._made = {name: made for name, made in self._made.items() if name in store.engines}
        return [self._fragment(engine, store, targets) for engine in engines]

    def _fragment(self, engine: EngineRecord, store: Store, targets: Targets) -> msgspec.Raw:
        made_of = (
            engine,
            store.versions.get(engine.serving or ""),
            targets.target_of(engine.run),
            store.away_since.get(engine.id),
        )
        known, why = self._made.get(engine.id), why_now(engine, store, targets)
        if known is not None and known[1] == why and all(a is b for a, b in zip(known[0], made_of, strict=True)):
            return known[2]
        fragment = msgspec.Raw(msgspec.json.encode(present_engine(engine, store, targets)))
        self._made[engine.id] = (made_of, why, fragment)
        return fragment


router = APIRouter(prefix="/v1", tags=["overview"])


class Cached:
    """The last overview, in JSON. It is good until the store changes again, or something else goes wrong.

    Only its time is that of each answer: readers tell by it how old what they show is, and how long an engine has been
    away, also while nothing changes.
    """

    def __init__(self, fragments: Fragments | None = None, **of_service: Any) -> None:
        """`fragments` has the engines in JSON; `of_service` are the fields that are the same in every answer."""
        self._of_service, self._fragments = of_service, fragments or Fragments()
        self._as_of: tuple[int, int, Faults, FollowedUpstream | None] = (-1, -1, Faults(), None)
        self._before, self._after = b"", b""  # the instant

    def json(self, store: Store, targets: Targets, faults: Faults) -> bytes:
        now = (store.changed.count, store.journal.newest_event, faults, store.runs.upstream)
        if self._as_of != now:
            named = self._fragments.of((store.engines[name] for name in sorted(store.engines)), store, targets)
            overview = overview_of(store, targets, faults, engines=named, **self._of_service)
            at = msgspec.json.encode(overview.at)  # the first that stands in it
            self._before, _, self._after = msgspec.json.encode(overview).partition(at)
            self._as_of = now
        return self._before + msgspec.json.encode(store.clock.now()) + self._after


@router.get("/overview", response_class=Response, responses={200: {"model": Overview}})
async def overview(service: ServiceOf, request: Request) -> Response:
    """Each run with a sentence that says whether its engines are on the newest version; all engines; counts."""
    cached: Cached = request.app.state.overview
    faults = await faults_now(service.store)  # a full disk is a fault among others, and no error of this route
    return Response(cached.json(service.store, service.targets, faults), media_type="application/json")


def overview_of(
    store: Store, targets: Targets, faults: Faults, *, engines: Sequence[Any] | None = None, **of_service: Any
) -> Overview:
    """Return the overview.

    Args:
        engines: all engines, sorted, where they are made already, also in JSON.
        of_service: `wants_token`, whether any route refuses requests without a token; `leader` and `keeps`.
    """
    if engines is None:
        engines = [present_engine(engine, store, targets) for _, engine in sorted(store.engines.items())]
    versions = dict.fromkeys(VersionState, 0)
    for version in store.versions.values():
        versions[version.state] += 1
    return Overview(
        at=store.clock.now(),
        event=store.journal.newest_event,
        strategy=targets.strategy.name,
        faults=faults,
        runs=[glance_at(store, targets, run) for run in runs_of(store)],
        engines=list(engines),
        versions=versions | {VersionState.DELETED: len(store.gone)},
        held_bytes=sum(version.files.bytes or 0 for version in store.versions.values()),
        follows=None if store.runs.upstream is None else store.runs.upstream.whom_it_follows,
        **of_service,
    )
