"""GET /v1/overview: each run's standing in sentences, all engines, counts; made and encoded once for all readers.

The dashboard, `refitd top` and `refitd status` show these very words, so that all say the same.
"""

from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response

from refitd.api.context import ServiceOf
from refitd.api.fragments import Fragments
from refitd.api.health import faults_now
from refitd.explain.present import present_engine
from refitd.explain.run import glance_at, runs_of
from refitd.state.store import Store
from refitd.state.upstream import UpstreamWord
from refitd.update.targets import Targets
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Engine, Faults, GroupLead, Keeping, Overview

router = APIRouter(prefix="/v1", tags=["overview"])


class Cached:
    """The last overview, in JSON. It is good until the store changes again, or something else goes wrong.

    Only its time is that of each answer: readers tell by it how old what they show is, and how long an engine has been
    away, also while nothing changes.
    """

    def __init__(
        self,
        *,
        wants_token: bool = False,
        leader: GroupLead | None = None,
        keeps: Keeping | None = None,
        fragments: Fragments | None = None,
    ) -> None:
        """`wants_token`, `leader` and `keeps` are those of every answer; `fragments` has the engines."""
        self._wants_token, self._leader, self._keeps = wants_token, leader, keeps
        self._fragments = fragments or Fragments()
        self._as_of: tuple[int, int, Faults, UpstreamWord | None] = (-1, -1, Faults(), None)
        self._before, self._after = b"", b""  # the instant

    def json(self, store: Store, targets: Targets, faults: Faults) -> bytes:
        """Return the overview as it is now.

        Args:
            store: what the service knows.
            targets: what engines are to serve.
            faults: what is wrong with the service.
        """
        now = (store.changed.count, store.journal.newest_event, faults, store.runs.upstream)
        if self._as_of != now:
            named = self._fragments.of((store.engines[name] for name in sorted(store.engines)), store, targets)
            overview = overview_of(
                store,
                targets,
                faults,
                wants_token=self._wants_token,
                leader=self._leader,
                keeps=self._keeps,
                engines=cast("list[Engine]", named),  # in JSON already
            )
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
    store: Store,
    targets: Targets,
    faults: Faults,
    *,
    wants_token: bool,
    leader: GroupLead | None = None,
    keeps: Keeping | None = None,
    engines: list[Engine] | None = None,
) -> Overview:
    """Return the overview.

    Args:
        store: what the service knows.
        targets: what engines are to serve.
        faults: what is wrong with the service.
        wants_token: whether any route refuses requests without a token.
        leader: this service, where it leads a group.
        keeps: what this service keeps.
        engines: all engines, sorted, where they are made already.
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
        wants_token=wants_token,
        runs=[glance_at(store, targets, run) for run in runs_of(store)],
        engines=engines,
        versions=versions | {VersionState.DELETED: len(store.gone)},
        held_bytes=sum(version.bytes or 0 for version in store.versions.values()),
        leader=leader,
        keeps=keeps,
    )
