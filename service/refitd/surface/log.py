"""Routes of the log: its pages, the event stream, and explanations."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from refitd.journal import reads
from refitd.journal.journal import JournalError
from refitd.ledger import Ledger
from refitd.not_yet import unknown
from refitd.problem import Kind
from refitd.surface.context import ServiceOf
from refitd.surface.explain import explain_engine, explain_run, explain_version
from refitd.surface.feed import Feed, FellBehindError
from refitd.surface.meant import engine_meant, meant
from refitd.surface.overview import glance_at, runs_of
from refitd.surface.streams import stream_slot
from refitd.surface.versions import find
from refitd_client.contract.wire import Event, Explanation, Page, ReclaimPlan

router = APIRouter(prefix="/v1", tags=["log"])
log = structlog.get_logger("refitd")

_NAMED = 5  # of what somebody may have meant
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
    """Why a run, a version or an engine is where it is, in sentences.

    A version can be named by its step or its folder alone where there is one of that name, an engine by its URL. Of a
    run it is said how it stands, and then where its target is.
    """
    if engine := service.ledger.engines.get(engine_meant(subject, service.ledger)):
        return Explanation(id=engine.id, sentences=explain_engine(engine, service.ledger))
    record = await service.ledger.find(subject)
    if record is None:
        candidates = meant(subject, service.ledger)
        if not candidates and subject in runs_of(service.ledger):
            return Explanation(id=subject, sentences=explain_run(glance_at(service.ledger, subject), None))
        if len(candidates) != 1:
            raise unknown(service.ledger, Kind.UNKNOWN_ID, _unknown(subject, candidates, service.ledger))
        record = await find(service, candidates[0])
    waits_for = None if service.copier is None else service.copier.why_waiting(record)
    try:
        plan = await service.sweeper.plan()
    except OSError as error:
        sentences = explain_version(record, service.ledger, ReclaimPlan(items=[], freed_bytes=0), waits_for)
        sentences.append(f"Whether it is kept cannot be said now: the root cannot be worked on ({error}).")
    else:
        sentences = explain_version(record, service.ledger, plan, waits_for)
    if subject == record.run:
        sentences = [*explain_run(glance_at(service.ledger, subject), record.id), *sentences]
    return Explanation(id=record.id, sentences=sentences)


def _unknown(subject: str, candidates: Sequence[str], ledger: Ledger) -> str:
    """What to ask for in the place of something that is no one version and no engine."""
    if candidates:
        named = ", ".join(f"'refitd explain {id_}'" for id_ in candidates[:_NAMED])
        more = f" and {len(candidates) - _NAMED} more" if len(candidates) > _NAMED else ""
        return f"{subject} may be {len(candidates)} versions: {named}{more}"
    lists = "'refitd runs', 'refitd versions' and 'refitd engines' list what there is"
    return f"no run, version or engine has the name {subject!r}: {lists}"
