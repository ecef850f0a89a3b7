"""Routes of what happened and why: the log, the event stream, and explanations."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec
import sqlalchemy as sa
import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from refitd.api.context import Service, ServiceOf, engine_id_of, find_version, ids_of_step, other_generations
from refitd.api.limits import stream_slot
from refitd.explain.present import upstream_of
from refitd.explain.run import explain_run, glance_at, of_its_run, runs_of
from refitd.explain.version import explain_engine, explain_version, overtaken_by
from refitd.observe.history import engine_past, past_update
from refitd.policy.readiness import unknown
from refitd.problem import ProblemError, Slug
from refitd.state.journal import rows
from refitd.state.journal.journal import JournalError
from refitd.state.observer import LogFilter
from refitd.state.records import NOT_SENT
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd.update.targets import Targets
from refitd_client.contract.history import EnginePast, History, PastUpdate
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import Event, Explanation, Page, ReclaimPlan

FRAME_SECONDS = 0.05
FRAME_EVENTS = 1000
FRAME_BYTES = 2**18
ROWS = 100  # read at a time: they may be long
KEPT_FRAMES = 256
KEPT_BYTES = 4 * 2**20
PING_SECONDS = 15.0  # a comment as often as this tells both sides that the other is there

PING = b": ping\n\n"


class FellBehindError(Exception):
    """A reader has not taken frames that are no longer kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Events `first` to `last`, as they go out."""

    first: int
    last: int
    data: bytes


class Feed:
    """The event stream, made once for all its readers.

    Events are gathered for up to 50 ms, read from the journal (so what is streamed is durable) and encoded into one
    frame, which every reader is sent as it is. The newest frames are kept for readers that are a little behind; they
    are the only buffer. A reader that has fallen behind the oldest frame is dropped, and costs nothing more. It loses
    nothing: it comes back with Last-Event-ID, and gets what it missed from the journal at its own pace.

    There is no task behind this: of the readers that wait for a frame, one makes it for all.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._last = 0
        self._made_at = 0.0
        self._watchers = 0
        self._turn = asyncio.Lock()

    async def watch(self, position: int) -> AsyncIterator[bytes]:
        """Yield what to send to a reader that has seen all events up to `position`, without end.

        Raises:
            FellBehindError: it takes them more slowly than they come.
            JournalError: the journal cannot be written now, so that nothing new is durable.
        """
        with self._watching():
            while position < self._oldest:  # it missed something, and gets it at its own pace
                await self._store.durable()
                frame = await self._read(position)
                position = frame.last
                yield frame.data
            while True:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        frame = await self._next(position)
                except TimeoutError:
                    yield PING
                    continue
                position = frame.last
                yield frame.data

    @contextmanager
    def _watching(self) -> Generator[None]:
        """Count a reader. Frames are made while there is one; older ones are of no use to one that comes later."""
        if self._watchers == 0:
            self._frames.clear()
            self._bytes = 0
            self._last = self._store.last_event
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    @property
    def _oldest(self) -> int:
        """A reader that has seen this event can be sent what follows from the frames."""
        return self._frames[0].first - 1 if self._frames else self._last

    async def _next(self, position: int) -> Frame:
        if position < self._oldest:
            raise FellBehindError
        while self._last <= position:
            async with self._turn:
                if self._last <= position:  # no other reader made it while this one waited for its turn
                    await self._make()
        # The frame with the event behind `position`. Most readers wait for the newest, so the search begins there.
        frame = next(frame for frame in reversed(self._frames) if frame.first <= position + 1)
        # A reader that caught up from the journal may have seen half of a frame.
        return frame if frame.first == position + 1 else await self._read(position)

    async def _make(self) -> None:
        seen = self._store.changed.count
        while self._store.last_event <= self._last:
            seen = await self._store.changed.wait_after(seen)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._made_at + FRAME_SECONDS - loop.time()))
        await self._store.durable()
        frame = await self._read(self._last)
        self._made_at = loop.time() if frame.last == self._store.last_event else 0.0  # what did not fit follows at once
        self._frames.append(frame)
        self._bytes += len(frame.data)
        self._last = frame.last
        while len(self._frames) > KEPT_FRAMES or (self._bytes > KEPT_BYTES and len(self._frames) > 1):
            self._bytes -= len(self._frames.popleft().data)

    async def _read(self, after: int) -> Frame:
        return await asyncio.to_thread(self._store.journal.read, lambda connection: _gather(connection, after))


def _gather(connection: sa.Connection, after: int) -> Frame:
    """Return the events behind `after`, as many as fit into one frame. Blocks."""
    data, last = bytearray(), after
    while last - after < FRAME_EVENTS:
        events = rows.read_events(connection, after=last, limit=ROWS)
        for event in events:
            data += encode(event)
            last = event.seq
            if len(data) >= FRAME_BYTES:
                break
        if len(events) < ROWS or len(data) >= FRAME_BYTES:
            break
    return Frame(first=after + 1, last=last, data=bytes(data))


def encode(event: Event) -> bytes:
    """Encode a server-sent event (WHATWG): its kind, the number that Last-Event-ID takes, and all of it in JSON."""
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), event.seq, msgspec.json.encode(event))


router = APIRouter(prefix="/v1", tags=["log"])
log = structlog.get_logger("refitd")

_LOADS_TOLD = 1000  # of a version that was overtaken; more than that tell nothing new
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/log")
async def list_events(
    service: ServiceOf,
    subject: str | None = None,
    run: str | None = None,
    engine: str | None = None,
    severity: LogSeverity | None = None,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Page[Event]:
    """The log of decisions, newest first. `subject` is the id of a version or an engine, `before` a `next_cursor`.

    `run` asks for what concerns a run: its versions, its updates, and engines while they followed it. `engine` asks
    for entries about one engine, `severity` for those that are at least so grave. A page of a filter that few entries
    fit may be short, or empty, before the last: go on while there is a `next_cursor`.
    """
    wanted = LogFilter(run=run, engine=engine, severity=severity)
    await service.store.durable()
    found, more = await asyncio.to_thread(
        service.store.journal.read,
        lambda connection: rows.read_log(connection, before=before, limit=limit, subject=subject, wanted=wanted),
    )
    return Page(items=found, next_cursor=None if more is None else str(more))


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    dependencies=[Depends(stream_slot)],
)
async def events(
    service: ServiceOf,
    request: Request,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
) -> StreamingResponse:
    """The log as server-sent events: from behind Last-Event-ID, or from now on."""
    position = service.store.last_event if last_event_id is None else last_event_id
    if position > service.store.last_event:
        position = 0  # of a journal that was lost since: all of this one is news
    feed: Feed = request.app.state.feed
    return StreamingResponse(_stream(feed, position), media_type="text/event-stream", headers=_UNBUFFERED)


async def _stream(feed: Feed, position: int) -> AsyncIterator[bytes]:
    try:
        async for frame in feed.watch(position):
            yield frame
    except FellBehindError:
        log.info("a watcher of the event stream was dropped: it takes events more slowly than they come")
    except JournalError as error:
        log.info("the event stream ends: nothing can be written down now", reason=str(error))


@router.get("/explain/{subject:path}")  # a run's name, which is none of these, may have slashes
async def explain(subject: str, service: ServiceOf) -> Explanation:
    """Why a run, a version or an engine is where it is, in sentences.

    A version can be named by its step or its folder if only one run has it, an engine by its URL. For a run, the
    answer has its status and then its target.
    """
    if engine := service.store.engines.get(engine_id_of(subject, service.store)):
        return Explanation(id=engine.id, sentences=explain_engine(engine, service.store, service.targets))
    record = await service.store.find(subject)
    if record is None:
        candidates = version_ids_of(subject, service.store, service.targets)
        if not candidates and subject in runs_of(service.store):
            run = glance_at(service.store, service.targets, subject)
            return Explanation(id=subject, sentences=explain_run(run, None))
        if len(candidates) != 1:
            raise unknown(service.store, Slug.UNKNOWN_ID, _unknown(subject, candidates, service.store))
        record = await find_version(service, candidates[0])
    waits_for = None if service.copies is None else service.copies.why_waiting(record)
    plan, untold = ReclaimPlan(items=[], freed_bytes=0), list[str]()
    try:
        plan = await service.sweeper.plan()
    except OSError as error:
        untold = [f"Whether it is kept cannot be said now: the root cannot be worked on ({error})."]
    never_sent = await _was_never_sent(record, service)
    about = explain_version(record, service.store, service.targets, plan, waits_for, never_sent=never_sent)
    word = upstream_of(service.store, record.run)
    sentences = [*about, *untold, *([] if word is None else word.last_report(service.store.clock.monotonic()))]
    if subject == record.run:
        seen = glance_at(service.store, service.targets, subject)
        sentences = [*explain_run(seen, record.id), *of_its_run(sentences, subject)]
    return Explanation(id=record.id, sentences=sentences)


async def _was_never_sent(record: VersionRecord, service: Service) -> bool:
    """Whether a version was overtaken, and the journal has no load of it that an engine was asked for."""
    store = service.store
    if overtaken_by(record, store, service.targets) is None:
        return False
    try:
        await store.durable()  # a load that has just begun counts too
        loads = await asyncio.to_thread(
            store.journal.read, lambda connection: rows.read_attempts(connection, version=record.id, limit=_LOADS_TOLD)
        )
    except JournalError:
        return False
    return all(load.outcome == NOT_SENT for load in loads)


def _unknown(subject: str, candidates: Sequence[str], store: Store) -> str:
    """What to ask for in the place of something that is no one version and no engine."""
    if candidates:
        return f"{subject} may be {len(candidates)} versions: {_commands(candidates)}"
    if others := other_generations(subject, store):
        return f"no version {subject}, but that step in another generation: {_commands(others)}"
    if hosts := _hosts_of(subject, store):
        whose, which = ("host", "that host") if len(hosts) == 1 else ("hosts", "the one that you mean")
        return f"engine {subject} belongs to {whose} {listed(hosts)}: ask {which}"
    lists = "'refitd runs', 'refitd versions' and 'refitd engines' list what there is"
    return f"no run, version or engine has the name {subject!r}: {lists}"


def _hosts_of(subject: str, store: Store) -> list[str]:
    """The hosts that name an engine so as their own."""
    name = subject.removeprefix("http://").removeprefix("https://").rstrip("/")
    hosts = ((engine.id, engine.seen.host) for engine in store.engines.values())
    return sorted(id_ for id_, host in hosts if host is not None and name in {each.id for each in host.engines})


def _commands(ids: Sequence[str]) -> str:
    return listed([f"'refitd explain {id_}'" for id_ in ids], most=5)


def version_ids_of(word: str, store: Store, targets: Targets) -> list[str]:
    """Return the ids of the versions that a run's name, a step or a folder's name may mean.

    A run is taken before a step: a run may be called `7`. Versions that are deleted count where no other fits.
    """
    if word in runs_of(store):
        target = targets.of_run(word).target
        return [] if target is None else [target.id]
    return sorted(ids_of_step(word, store))


MOST_UPDATES = 1000
_LOADS = 50_000  # loads that one request reads; about half a second
_LOADS_OF_ONE = 4000  # of one version: the newest
_EVENTS_A_LOAD = 4  # entries of the log about an engine: loads, verifies, serves, and one more
_REMEMBERED_LOADS = 4 * MOST_UPDATES

history_routes = APIRouter(prefix="/v1/history", tags=["history"])


class PastUpdates:
    """Sums up past updates, each once as long as nothing is added to it.

    The journal keeps every load. Those of a version that no engine loads any more do not change, so they are summed up
    once and remembered. A request reads at most `_LOADS` loads that are new to it, so a service that has just started
    answers at once, and says that it has not read all of them yet.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._known: dict[str, tuple[VersionRecord, int, PastUpdate]] = {}

    def read(
        self, connection: sa.Connection, run: str | None, limit: int, loading: Collection[str]
    ) -> tuple[list[PastUpdate], bool]:
        """Return the newest updates, and whether all their loads were read. Blocks; hold `lock`.

        Args:
            run: only updates of this run.
            loading: ids of the versions that an engine loads now.
        """
        versions = rows.read_versions(connection, run=run, limit=limit)
        counts = rows.count_attempts(connection, [version.id for version in versions])
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
                loads = rows.read_attempts(connection, version=version.id, limit=_LOADS_OF_ONE) if count else []
                updates.append(past_update(version, loads))
                left -= len(loads)
                if all(load.outcome is not None for load in loads):
                    self._known[version.id] = (version, count, updates[-1])
            else:
                updates.append(past_update(version, []))
                complete = False
        return updates, complete


@history_routes.get("", response_class=Response, responses={200: {"model": History}})
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


@history_routes.get("/engines/{engine_id:path}", response_class=Response, responses={200: {"model": EnginePast}})
async def engine_history(
    engine_id: str, service: ServiceOf, limit: Annotated[int, Query(ge=1, le=MOST_UPDATES)] = 200
) -> Response:
    """The newest loads of one engine and the times for which it was away, the oldest first.

    An engine that was removed still has its past. `limit` counts loads; outages are those of about the same time.
    """
    store = service.store
    meant = engine_id_of(engine_id, store)

    def look(connection: sa.Connection) -> bytes:
        loads = rows.read_attempts(connection, engine=meant, limit=limit + 1)
        events, _ = rows.read_log(connection, before=None, limit=_EVENTS_A_LOAD * limit + 100, subject=meant)
        if not loads and not events:
            raise ProblemError(Slug.UNKNOWN_ENGINE, f"no engine {meant}: 'refitd engines' lists what there is")
        past = engine_past(meant, loads[-limit:], reversed(events), more=len(loads) > limit)
        return msgspec.json.encode(past)

    await store.durable()
    return Response(await asyncio.to_thread(store.journal.read, look), media_type="application/json")
