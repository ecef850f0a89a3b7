"""Routes of the log: its pages, the event stream, and explanations."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from refitd.journal import reads
from refitd.journal.journal import JournalError
from refitd.ledger import Ledger
from refitd.problem import Kind, ProblemError
from refitd.surface.context import ServiceOf
from refitd.surface.explain import explain_engine, explain_version
from refitd.surface.feed import Feed, FellBehindError
from refitd.surface.overview import runs_of
from refitd.surface.streams import stream_slot
from refitd.surface.versions import find
from refitd_client.contract.wire import Event, Explanation, Page, ReclaimPlan

router = APIRouter(prefix="/v1", tags=["log"])
log = structlog.get_logger("refitd")

_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/log")
async def list_events(
    service: ServiceOf,
    subject: str | None = None,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Page[Event]:
    """The log of decisions, newest first. `subject` is the id of a version or an engine, `before` a `next_cursor`."""
    await service.ledger.durable()
    found = await asyncio.to_thread(
        service.ledger.journal.read,
        lambda connection: reads.read_log(connection, before=before, limit=limit + 1, subject=subject),
    )
    more = str(found[limit - 1].seq) if len(found) > limit else None
    return Page(items=found[:limit], next_cursor=more)


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
    position = service.ledger.last_event if last_event_id is None else last_event_id
    if position > service.ledger.last_event:
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
    """Why a version or an engine is where it is, in sentences."""
    if engine := service.ledger.engines.get(subject):
        return Explanation(id=subject, sentences=explain_engine(engine, service.ledger))
    try:
        record = await find(service, subject)
    except ProblemError as error:
        raise ProblemError(Kind.UNKNOWN_ID, _unknown(subject, service.ledger)) from error
    waits_for = None if service.copier is None else service.copier.why_waiting(record)
    try:
        plan = await service.sweeper.plan()
    except OSError as error:
        sentences = explain_version(record, service.ledger, ReclaimPlan(items=[], freed_bytes=0), waits_for)
        sentences.append(f"Whether it is kept cannot be said now: the root cannot be worked on ({error}).")
    else:
        sentences = explain_version(record, service.ledger, plan, waits_for)
    return Explanation(id=subject, sentences=sentences)


def _unknown(subject: str, ledger: Ledger) -> str:
    """What somebody may have meant who asked for something that is neither a version nor an engine."""
    if subject not in runs_of(ledger):
        return (
            f"no version and no engine is called {subject}: 'refitd versions' and 'refitd engines' list what there is"
        )
    target = ledger.goals(subject).target
    how = f"'refitd versions --run {subject}' lists its versions"
    aim = "" if target is None else f"'refitd explain {target.id}' explains its target, "
    return f"{subject} is a run, and neither a version nor an engine: {aim}{how}"
