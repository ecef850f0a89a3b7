"""Routes of reclaim: what would be collected, and why; do it."""

from fastapi import APIRouter

from refitd.surface.context import ServiceOf
from refitd_client.contract.wire import ReclaimPlan

router = APIRouter(prefix="/v1/reclaim", tags=["reclaim"])


@router.get("/plan")
async def plan(service: ServiceOf) -> ReclaimPlan:
    """What would be deleted and what kept, with the reasons."""
    return await service.sweeper.plan()


@router.post("")
async def reclaim(service: ServiceOf) -> ReclaimPlan:
    """Delete what the plan says, looking again right before each deletion."""
    return await service.sweeper.run()
