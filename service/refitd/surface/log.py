"""Routes of the log: the event stream and explanations."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from refitd.journal import reads
from refitd.problem import Kind, ProblemError
from refitd.surface.context import Service, ServiceOf
from refitd.surface.explain import explain_engine, explain_version
from refitd.surface.versions import find
from refitd_client.contract.wire import Event, Explanation

router = APIRouter(prefix="/v1", tags=["log"])

BATCH = 500


@router.get("/events", response_class=EventSourceResponse)
async def events(
    service: ServiceOf,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
) -> AsyncIterator[ServerSentEvent]:
    """The log as server-sent events: from behind Last-Event-ID, or from now on."""
    position = service.ledger.last_event if last_event_id is None else last_event_id
    seen = -1
    while True:
        seen = await service.ledger.bell.after(seen)
        await service.ledger.durable()
        while batch := await _read(service, position):
            for event in batch:
                yield ServerSentEvent(data=event, event=event.kind, id=str(event.seq))
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
    plan = await service.sweeper.plan()
    return Explanation(id=subject, sentences=explain_version(record, service.ledger, plan))
