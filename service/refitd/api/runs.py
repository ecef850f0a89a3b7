"""Routes of runs: close one that has ended, open it again."""

from fastapi import APIRouter

from refitd.api.context import Service, ServiceOf
from refitd.api.overview import glance_at, runs_of
from refitd.problem import Kind, ProblemError
from refitd_client.contract.wire import OneRun, RunGlance

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("/close")
async def close(order: OneRun, service: ServiceOf) -> RunGlance:
    """Say that a run has ended.

    It is not troubled any more, and does not want engines. Those that follow it go on with what they serve, and may be
    moved to another run. Of its versions the newest good one is kept, with what engines need, what is pinned and every
    Nth (`--keep-every`); of those that are UNKNOWN the newest, where it is newer than that. Collection deletes the
    others, and the run's slots. The next version that is published opens it again.
    It outlives a restart of the service.
    """
    _check(service, order.run)
    service.store.close_run(order.run)
    return await _seen(service, order.run)


@router.post("/reopen")
async def reopen(order: OneRun, service: ServiceOf) -> RunGlance:
    """Take back that a run has ended. What was deleted meanwhile stays deleted."""
    _check(service, order.run)
    service.store.reopen_run(order.run, "somebody has opened it")
    return await _seen(service, order.run)


def _check(service: Service, run: str) -> None:
    if run not in runs_of(service.store):
        raise ProblemError(Kind.UNKNOWN_RUN, f"no run {run} is known: 'refitd runs' lists what there is")


async def _seen(service: Service, run: str) -> RunGlance:
    await service.store.durable()
    return glance_at(service.store, service.targets, run)
