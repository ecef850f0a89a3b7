"""Routes of rollback: where one would lead, and doing it. Both decide by the same function."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter

from refitd.api.context import Service, ServiceOf
from refitd.api.versions import find, presented
from refitd.policy.readiness import unknown
from refitd.policy.target import last_good_before, to_bar, unserved_before
from refitd.problem import Kind, ProblemError
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Rollback, RollbackPlan, Version

_NAMED = 5  # versions that a refusal offers; the others it counts

router = APIRouter(prefix="/v1/rollback", tags=["rollback"])


@router.get("")
async def plan_rollback(service: ServiceOf, run: str, to: str | None = None) -> RollbackPlan:
    """Where a rollback would lead, and what it would bar for good. Nothing is done."""
    way = await _way(service, Rollback(run=run, to=to))
    away = [engine.id for engine in service.store.engines_of(run) if engine.state is EngineState.UNREACHABLE]
    return RollbackPlan(
        run=run,
        leaves=way.leaves.id,
        goal=way.goal.id,
        barred=[version.id for version in way.barred],
        unreachable=sorted(away),
    )


@router.post("")
async def rollback(order: Rollback, service: ServiceOf) -> Version:
    """Roll forward to an earlier good version: what is newer is barred, versions that come later roll as usual."""
    way = await _way(service, order)
    for version in way.barred:
        told = f"barred: run {order.run} rolls back to {way.goal.id}"
        service.store.put_version(replace(version, barred=True), told)
    await service.store.durable()
    return presented(service, way.goal)


@dataclass(frozen=True, slots=True)
class _Way:
    leaves: VersionRecord
    goal: VersionRecord
    barred: Sequence[VersionRecord]


async def _way(service: Service, order: Rollback) -> _Way:
    goal = None if order.to is None else await _named(service, order.run, order.to)
    # Nothing is awaited from here on: what is decided is still true where it is done.
    versions = service.store.published_of(order.run)
    if not versions:
        raise unknown(service.store, Kind.UNKNOWN_RUN, f"no version of run {order.run} is known")
    current = service.targets.of_run(order.run).target
    if current is None:
        raise ProblemError(Kind.NOTHING_TO_ROLL_BACK, f"run {order.run} has no good version")
    goal = goal or last_good_before(versions, current)
    if goal is None:
        raise ProblemError(Kind.NOTHING_TO_ROLL_BACK, _nowhere(current, unserved_before(versions, current)))
    return _Way(current, goal, to_bar(versions, goal))


async def _named(service: Service, run: str, to: str) -> VersionRecord:
    version = await find(service, to)
    if version.run != run or version.state is not VersionState.SEALED or version.barred:
        why = (
            "is barred for good: it was rolled back from"
            if version.barred and not version.was_never_served
            else f"is {version.state}, of run {version.run}"
        )
        what = f"roll back to a SEALED version of run {run} that is not barred"
        raise ProblemError(
            Kind.VERSION_NOT_GOOD, f"{version.id} {why}; {what}, or publish its weights as the next step"
        )
    return version


def _nowhere(current: VersionRecord, unserved: Sequence[VersionRecord]) -> str:
    told = f"no version of run {current.run} before {current.id} was served and is still there"
    if not unserved:
        return f"{told}, and no other good one is"
    more = f" and {len(unserved) - _NAMED} more" if len(unserved) > _NAMED else ""
    named = ", ".join(version.id for version in unserved[:_NAMED])
    return (
        f"{told}; good, but never served: {named}{more}. "
        f"Name one: 'refitd rollback {current.run} --to {unserved[0].id}' ('to' in the API)"
    )
