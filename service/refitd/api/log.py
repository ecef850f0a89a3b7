"""Routes of what happened and why: the log, the event stream, and explanations."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from refitd.api.context import Service, ServiceOf, engine_id_of, find_version, ids_of_step, other_generations
from refitd.api.feed import Feed, FellBehindError
from refitd.api.waiting import stream_slot
from refitd.explain.engine import explain_engine
from refitd.explain.present import upstream_of
from refitd.explain.run import explain_run, glance_at, of_its_run, runs_of
from refitd.explain.version import explain_version, overtaken_by
from refitd.policy.readiness import unknown
from refitd.policy.upstream import last_report
from refitd.problem import Slug
from refitd.state.journal import reads
from refitd.state.journal.journal import JournalError
from refitd.state.log_entry import LogFilter
from refitd.state.records import NOT_SENT
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd.update.targets import Targets
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import Event, Explanation, Page, ReclaimPlan

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
        lambda connection: reads.read_log(connection, before=before, limit=limit, subject=subject, wanted=wanted),
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
    waits_for = None if service.materializer is None else service.materializer.why_waiting(record)
    plan, untold = ReclaimPlan(items=[], freed_bytes=0), list[str]()
    try:
        plan = await service.sweeper.plan()
    except OSError as error:
        untold = [f"Whether it is kept cannot be said now: the root cannot be worked on ({error})."]
    never_sent = await _was_never_sent(record, service)
    about = explain_version(record, service.store, service.targets, plan, waits_for, never_sent=never_sent)
    word = upstream_of(service.store, record.run)
    sentences = [*about, *untold, *last_report(word, service.store.clock.monotonic())]
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
            store.journal.read, lambda connection: reads.read_attempts(connection, version=record.id, limit=_LOADS_TOLD)
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
    lists = "'refitd runs', 'refitd versions' and 'refitd engines' list what there is"
    return f"no run, version or engine has the name {subject!r}: {lists}"


def _commands(ids: Sequence[str]) -> str:
    return listed([f"'refitd explain {id_}'" for id_ in ids], most=5)


def version_ids_of(word: str, store: Store, targets: Targets) -> list[str]:
    """Return the ids of the versions that a run's name, a step or a folder's name may mean.

    A run is taken before a step: a run may be called `7`. Versions that are deleted count where no other fits.

    Args:
        word: what was asked for.
        store: the versions.
        targets: a run means its target.
    """
    if word in runs_of(store):
        target = targets.of_run(word).target
        return [] if target is None else [target.id]
    return sorted(ids_of_step(word, store))
