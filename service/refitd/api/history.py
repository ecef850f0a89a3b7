"""Routes of what has been: past updates with percentiles, and one engine's loads and outages, from the journal.

The journal keeps every load. Those of a version that no engine loads any more do not change, so they are summed up once
and remembered; how many there are by now is asked each time. A request reads at most `_LOADS` loads that are new to it,
so a service that has just started answers at once, and says that it has not read all of them yet.
"""

import asyncio
from collections.abc import Collection
from typing import Annotated

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Query, Request, Response

from refitd.api.context import ServiceOf, engine_id_of
from refitd.explain.run import runs_of
from refitd.observe.history import engine_past, past_update
from refitd.policy.readiness import unknown
from refitd.problem import ProblemError, Slug
from refitd.state.journal import reads
from refitd.state.version import VersionRecord
from refitd_client.contract.history import EnginePast, History, PastUpdate

MOST_UPDATES = 1000
_LOADS = 50_000  # loads that one request reads; about half a second
_LOADS_OF_ONE = 4000  # of one version: the newest
_EVENTS_A_LOAD = 4  # entries of the log about an engine: loads, verifies, serves, and one more
_REMEMBERED_LOADS = 4 * MOST_UPDATES

router = APIRouter(prefix="/v1/history", tags=["history"])


class PastUpdates:
    """Sums up past updates, each once as long as nothing is added to it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._known: dict[str, tuple[VersionRecord, int, PastUpdate]] = {}

    def read(
        self, connection: sa.Connection, run: str | None, limit: int, loading: Collection[str]
    ) -> tuple[list[PastUpdate], bool]:
        """Return the newest updates, and whether all their loads were read. Blocks; hold `lock`.

        Args:
            connection: to the journal.
            run: only updates of this run.
            limit: how many.
            loading: ids of the versions that an engine loads now.
        """
        versions = reads.read_versions(connection, run=run, limit=limit)
        counts = reads.count_attempts(connection, [version.id for version in versions])
        if len(self._known) > _REMEMBERED_LOADS:
            self._known.clear()
        updates: list[PastUpdate] = []
        left, complete = _LOADS, True
        for version in versions:
            count = counts.get(version.id, 0)
            known = self._known.get(version.id)
            if known is not None and known[:2] == (version, count) and version.id not in loading:
                updates.append(known[2])
            elif left > 0:
                loads = reads.read_attempts(connection, version=version.id, limit=_LOADS_OF_ONE) if count else []
                updates.append(past_update(version, loads))
                left -= len(loads)
                if all(load.outcome is not None for load in loads):
                    self._known[version.id] = (version, count, updates[-1])
            else:
                updates.append(past_update(version, []))
                complete = False
        return updates, complete


@router.get("", response_class=Response, responses={200: {"model": History}})
async def history(
    service: ServiceOf,
    request: Request,
    run: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_UPDATES)] = MOST_UPDATES,
) -> Response:
    """The last updates, newest first: stages, percentiles of pauses and of the time to serve, sizes, and what failed.

    Versions whose files were deleted are among them. Of a version with more than 4,000 loads the newest count. 404 for
    a run of which nothing is known.
    """
    store, past = service.store, request.app.state.history
    await store.durable()

    def read() -> bytes:
        updates, complete = store.journal.read(lambda connection: past.read(connection, run, limit, loading))
        if run is not None and not updates and run not in runs_of(store):
            raise unknown(store, Slug.UNKNOWN_RUN, f"no run {run} is known: 'refitd runs' lists what there is")
        return msgspec.json.encode(History(at=store.clock.now(), updates=updates, complete=complete))

    async with past.lock:
        loading = frozenset(attempt.version for attempt in store.loading.values())
        return Response(await asyncio.to_thread(read), media_type="application/json")


@router.get("/engines/{engine_id:path}", response_class=Response, responses={200: {"model": EnginePast}})
async def engine_history(
    engine_id: str, service: ServiceOf, limit: Annotated[int, Query(ge=1, le=MOST_UPDATES)] = 200
) -> Response:
    """The newest loads of one engine and the times for which it was away, the oldest first.

    An engine that was removed still has its past. `limit` counts loads; outages are those of about the same time.
    """
    store = service.store
    meant = engine_id_of(engine_id, store)

    def look(connection: sa.Connection) -> bytes:
        loads = reads.read_attempts(connection, engine=meant, limit=limit + 1)
        events, _ = reads.read_log(connection, before=None, limit=_EVENTS_A_LOAD * limit + 100, subject=meant)
        if not loads and not events:
            raise ProblemError(Slug.UNKNOWN_ENGINE, f"no engine {meant}: 'refitd engines' lists what there is")
        past = engine_past(meant, loads[-limit:], reversed(events), more=len(loads) > limit)
        return msgspec.json.encode(past)

    await store.durable()
    return Response(await asyncio.to_thread(store.journal.read, look), media_type="application/json")
