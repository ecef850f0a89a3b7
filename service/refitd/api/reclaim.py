"""Routes of reclaim: what would be collected, and why; do it."""

from collections.abc import Generator
from contextlib import contextmanager

from fastapi import APIRouter

from refitd.api.context import ServiceOf
from refitd.problem import Kind, ProblemError
from refitd_client.contract.wire import ReclaimPlan

router = APIRouter(prefix="/v1/reclaim", tags=["reclaim"])


@router.get("/plan")
async def plan_reclaim(service: ServiceOf) -> ReclaimPlan:
    """What would be deleted and what kept, with the reasons."""
    with _on_the_root():
        return await service.sweeper.plan()


@router.post("")
async def reclaim(service: ServiceOf) -> ReclaimPlan:
    """Delete what the plan says, looking again right before each deletion."""
    with _on_the_root():
        return await service.sweeper.run()


@contextmanager
def _on_the_root() -> Generator[None]:
    try:
        yield
    except OSError as error:
        detail = f"the root cannot be worked on now: {error}; nothing more is deleted until it can"
        raise ProblemError(Kind.NOT_READY, detail) from error
