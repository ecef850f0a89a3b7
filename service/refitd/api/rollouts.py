"""Routes of rollouts: pause them, let them go on."""

from fastapi import APIRouter

from refitd.api.context import Service, ServiceOf
from refitd.api.overview import glance_at
from refitd.policy.readiness import unknown
from refitd.problem import Kind
from refitd_client.contract.wire import Rollouts, RunGlance

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])


@router.post("/pause")
async def pause(order: Rollouts, service: ServiceOf) -> RunGlance:
    """Bring no engine of the run to a newer version until it is resumed.

    Loads that are under way come to their end. An engine that is restarted or breaks is brought to the last good
    version, and a rollback is carried out. It outlives a restart of the service.
    """
    return await _set(service, order.run, paused=True)


@router.post("/resume")
async def resume(order: Rollouts, service: ServiceOf) -> RunGlance:
    """Let the rollouts of the run go on."""
    return await _set(service, order.run, paused=False)


async def _set(service: Service, run: str, *, paused: bool) -> RunGlance:
    rollout = service.store.rollouts.get(run)
    if rollout is None:
        is_known = bool(service.store.versions_of(run))
        lacks = f"run {run} has no rollout yet" if is_known else f"no version of run {run} is known"
        raise unknown(service.store, Kind.UNKNOWN_RUN, f"{lacks}: it can be paused as soon as it has a good version")
    service.store.pause_rollouts(rollout, paused=paused)
    await service.store.durable()
    return glance_at(service.store, service.targets, run)
