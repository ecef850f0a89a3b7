"""The route of webhooks: what was told to whom, and what waits."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from refitd.api.context import ServiceOf
from refitd.observe.webhooks.delivery_task import place_of
from refitd.state.delivery import DeliveryRecord, subject_of
from refitd.state.journal import reads
from refitd_client.contract.wire import Delivery, Page

router = APIRouter(prefix="/v1", tags=["webhooks"])


@router.get("/deliveries")
async def list_deliveries(
    service: ServiceOf,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Page[Delivery]:
    """Webhooks, the newest first, with how far each is. `before` is a `next_cursor`."""
    await service.store.durable()
    found = await asyncio.to_thread(
        service.store.journal.read,
        lambda connection: reads.read_deliveries(connection, before=before, limit=limit + 1),
    )
    more = str(found[limit - 1][0]) if len(found) > limit else None
    return Page(items=[_present(record) for _, record in found[:limit]], next_cursor=more)


def _present(record: DeliveryRecord) -> Delivery:
    return Delivery(
        id=record.id,
        topic=record.topic,
        to=place_of(record.url),
        state=record.state,
        tries=record.tries,
        created_at=record.created_at,
        ended_at=record.ended_at,
        reason=record.reason,
        about=subject_of(record),
    )
