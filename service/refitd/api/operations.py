"""Routes of what operators do: roll a run back, pause it, close it, and reclaim room."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import APIRouter

from refitd.api.context import Service, ServiceOf, find_version, ids_of_step, leave_to_upstream
from refitd.api.versions import presented
from refitd.explain.run import glance_at, runs_of
from refitd.policy.goals import last_good_before, to_bar, unserved_before
from refitd.policy.readiness import unknown
from refitd.problem import ProblemError, Slug
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import (
    DeletedRun,
    ReclaimPlan,
    Rollback,
    RollbackPlan,
    RunChange,
    RunGlance,
    Version,
)

_RUNS_LISTED = "'refitd runs' lists what there is"
_NONE_TO_GO_TO = f"no version of run {{run}} is known, so none to go to: publish a step of it first; {_RUNS_LISTED}"

rollback_routes = APIRouter(prefix="/v1/rollback", tags=["rollback"])
run_routes = APIRouter(prefix="/v1/runs", tags=["runs"])
reclaim_routes = APIRouter(prefix="/v1/reclaim", tags=["reclaim"])


@rollback_routes.get("")
async def plan_rollback(service: ServiceOf, run: str, to: str | None = None) -> RollbackPlan:
    """Where a rollback would lead, and what it would bar for good. Nothing is done.

    `to` is a version's id; or a step of the run, in its newest generation that has the step. 409 on a host
    that follows the run from an upstream, which decides that.
    """
    plan = await _planned(service, Rollback(run=run, to=to))
    away = [engine.id for engine in service.store.engines_of(run) if engine.state is EngineState.UNREACHABLE]
    unknown = {version for version, _ in service.hosts.leaves(plan.goal).values() if version}
    return RollbackPlan(
        run=run,
        leaves=plan.leaves.id,
        goal=plan.goal.id,
        barred=[version.id for version in plan.barred],
        unreachable=sorted(away),
        unknown=sorted(unknown, reverse=True),
    )


@rollback_routes.post("")
async def rollback(order: Rollback, service: ServiceOf) -> Version:
    """Roll forward to an earlier good version: what is newer is barred, versions that come later roll as usual.

    409 on a host that follows the run from an upstream, which would undo it: roll back there.
    """
    plan = await _planned(service, order)
    for version in plan.barred:
        text = f"barred: run {order.run} rolls back to {plan.goal.id}"
        service.store.put_version(version.having(barred=True), text)
    service.store.leave_behind(order.run, service.hosts.leaves(plan.goal))
    await service.decided()
    return presented(service, plan.goal)


@dataclass(frozen=True, slots=True)
class _Plan:
    leaves: VersionRecord
    goal: VersionRecord
    barred: Sequence[VersionRecord]


async def _planned(service: Service, order: Rollback) -> _Plan:
    leave_to_upstream(service, f"roll run {order.run} back", lambda up: up.decides_run(order.run))
    if not service.store.published_of(order.run):  # before a version is blamed that is named with it
        raise unknown(service.store, Slug.UNKNOWN_RUN, _NONE_TO_GO_TO.format(run=order.run))
    goal = None if order.to is None else await _sealed(service, order.run, order.to)
    # Nothing is awaited from here on: what is decided is still true where it is done.
    versions = service.store.published_of(order.run)
    current = service.targets.of_run(order.run).target
    if current is None:
        explains = f"'refitd explain {order.run}' says why, and what it waits for"
        raise ProblemError(Slug.NOTHING_TO_ROLL_BACK, f"run {order.run} has no good version: {explains}")
    goal = goal or last_good_before(versions, current)
    if goal is None:
        raise ProblemError(Slug.NOTHING_TO_ROLL_BACK, _why_nowhere(current, unserved_before(versions, current)))
    # What was lost and is deleted here may be in an object store, whose followers are to go back as well.
    known = {version.id: version for version in (*versions, *service.store.index.lost_too_of(order.run))}
    newest_first = sorted(known.values(), key=lambda version: version.order, reverse=True)
    return _Plan(current, goal, to_bar(newest_first, goal))


async def _sealed(service: Service, run: str, to: str) -> VersionRecord:
    version = await find_version(service, next(iter(ids_of_step(to, service.store, run)), to))
    if version.run != run or version.state is not VersionState.SEALED or version.barred:
        why = (
            f"is barred for good: {version.why_barred}"
            if version.barred and not version.was_never_served
            else f"is {version.state}, of run {version.run}"
        )
        what = f"roll back to a SEALED version of run {run} that is not barred"
        raise ProblemError(
            Slug.VERSION_NOT_GOOD, f"{version.id} {why}; {what}, or publish its weights as the next step"
        )
    return version


def _why_nowhere(current: VersionRecord, unserved: Sequence[VersionRecord]) -> str:
    text = f"no version of run {current.run} before {current.id} was served and is still there"
    if not unserved:
        return (
            f"{text}, and no other good one is: publish weights that are good as the next step, which is loaded as "
            f"usual, or stop updates meanwhile with 'refitd pause {current.run}'"
        )
    named = listed([version.id for version in unserved], most=5)
    return (
        f"{text}; good, but never served: {named}. "
        f"Name one: 'refitd rollback {current.run} --to {unserved[0].id}' ('to' in the API)"
    )


@run_routes.post("")
async def change_run(order: RunChange, service: ServiceOf) -> RunGlance:
    """Close a run or open it again (`closed`), pause its updates or let them go on (`paused`): one of the two.

    A closed run has ended. It is not troubled any more, and does not want engines. Those that follow it go on with what
    they serve, and may be moved to another run. Of its versions the newest good one is kept, with what engines need,
    what is pinned and every Nth (`--keep-every`); of those that are UNKNOWN the newest, where it is newer than that.
    Collection deletes the others, and the run's slots; what was deleted stays deleted when the run is opened again. The
    next version that is published opens it. 409 on a host that follows the run from an upstream where it has not
    ended: close it there.

    While a run is paused no engine of it is brought to a newer version. Loads that are under way come to their end. An
    engine that is restarted or breaks is brought to the last good version, and a rollback is carried out. On a host
    that follows an upstream it holds for the engines of this host.

    Both outlive a restart of the service.
    """
    if (order.closed is None) is (order.paused is None):
        raise ProblemError(Slug.BAD_REQUEST, "say either 'closed' or 'paused' of the run")
    if order.paused is not None:
        _set_pause(service, order.run, paused=order.paused)
    else:
        _check_run(service, order.run)
        if order.closed:
            leave_to_upstream(service, f"close run {order.run}", lambda up: up.decides_end(order.run))
            service.store.close_run(order.run)
        else:
            service.store.reopen_run(order.run, "a request opened it")
    await service.decided()
    return glance_at(service.store, service.targets, order.run)


def _set_pause(service: Service, run: str, *, paused: bool) -> None:
    update = service.store.updates.get(run)
    if update is None:
        is_known = bool(service.store.versions_of(run))
        lacks = f"run {run} has no update yet" if is_known else f"no version of run {run} is known"
        raise unknown(service.store, Slug.UNKNOWN_RUN, f"{lacks}: it can be paused as soon as it has a good version")
    service.store.pause_updates(update, paused=paused)


@run_routes.delete("/{run:path}")
async def delete(run: str, service: ServiceOf) -> DeletedRun:
    """Delete a run with all its versions. Collection deletes their files, in the background and after a restart too.

    409 while it is needed: a publisher that is alive holds it, an engine follows it or serves a version of it, a
    version is pinned or has no verdict yet, or a folder is its trainer's to delete. What lies in an object store stays.
    The next version that is published begins a new generation. 409 on a host that follows the run from an upstream
    where it has not ended: delete it there.
    """
    _check_run(service, run)
    leave_to_upstream(service, f"delete run {run}", lambda up: up.decides_end(run))
    try:
        why = await service.sweeper.why_not_deleted(run)
    except OSError as error:
        raise ProblemError(Slug.NOT_READY, f"whether run {run} is needed cannot be seen: {error}") from error
    if why is not None:
        raise ProblemError(Slug.RUN_NEEDED, why)
    count = service.store.delete_run(run)  # nothing is awaited between the answer and this
    await service.decided()
    return DeletedRun(run=run, versions=count)


def _check_run(service: Service, run: str) -> None:
    if run not in runs_of(service.store):
        raise ProblemError(Slug.UNKNOWN_RUN, f"no run {run} is known: {_RUNS_LISTED}")


@reclaim_routes.get("/plan")
async def plan_reclaim(service: ServiceOf) -> ReclaimPlan:
    """What would be deleted and what kept, with the reasons."""
    with _on_the_root():
        return await service.sweeper.plan()


@reclaim_routes.post("")
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
        raise ProblemError(Slug.NOT_READY, detail) from error
