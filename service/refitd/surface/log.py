"""Routes of the log: the event stream and explanations."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Header
from fastapi.responses import StreamingResponse

from refitd.journal import reads
from refitd.problem import Kind, ProblemError
from refitd.surface.context import Service, ServiceOf
from refitd.surface.explain import explain_engine, explain_version
from refitd.surface.streams import stream_slot
from refitd.surface.versions import find
from refitd_client.contract.wire import Event, Explanation, ReclaimPlan

router = APIRouter(prefix="/v1", tags=["log"])

BATCH = 100
PING_SECONDS = 15.0  # a comment as often as this tells both sides that the other is there
_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    dependencies=[Depends(stream_slot)],
)
async def events(
    service: ServiceOf,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
) -> StreamingResponse:
    """The log as server-sent events: from behind Last-Event-ID, or from now on."""
    position = service.ledger.last_event if last_event_id is None else last_event_id
    if position > service.ledger.last_event:
        position = 0  # of a journal that was lost since: all of this one is news
    return StreamingResponse(_stream(service, position), media_type="text/event-stream", headers=_UNBUFFERED)


async def _stream(service: Service, position: int) -> AsyncIterator[bytes]:
    """Each event is read when the one before it was taken, so a slow reader costs no memory."""
    seen = -1
    while True:
        rung = await service.ledger.bell.after(seen, within=PING_SECONDS)
        if rung == seen:
            yield b": ping\n\n"
        seen = rung
        await service.ledger.durable()
        while batch := await _read(service, position):
            for event in batch:
                yield b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), event.seq, msgspec.json.encode(event))
            position = batch[-1].seq


async def _read(service: Service, after: int) -> list[Event]:
    if after >= service.ledger.last_event:
        return []
    return await asyncio.to_thread(
        service.ledger.journal.read, lambda connection: reads.read_events(connection, after=after, limit=BATCH)
    )


@router.get("/explain/{subject}")
async def explain(subject: str, service: ServiceOf) -> Explanation:
    """Why a version or an engine is where it is, in sentences."""
    if engine := service.ledger.engines.get(subject):
        return Explanation(id=subject, sentences=explain_engine(engine, service.ledger))
    try:
        record = await find(service, subject)
    except ProblemError as error:
        raise ProblemError(Kind.UNKNOWN_ID, f"no version and no engine is called {subject}") from error
    waits_for = None if service.copier is None else service.copier.why_waiting(record)
    try:
        plan = await service.sweeper.plan()
    except OSError as error:
        sentences = explain_version(record, service.ledger, ReclaimPlan(items=[], freed_bytes=0), waits_for)
        sentences.append(f"Whether it is kept cannot be said now: the root cannot be worked on ({error}).")
    else:
        sentences = explain_version(record, service.ledger, plan, waits_for)
    return Explanation(id=subject, sentences=sentences)
