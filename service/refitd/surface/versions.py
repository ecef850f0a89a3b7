"""Routes of versions: the notice, lists, waiting, pins, rollback."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from refitd.catalog.record import VersionRecord
from refitd.journal import reads
from refitd.problem import Kind, ProblemError
from refitd.rollout.served import is_proven, outcome_of
from refitd.rollout.target import last_good_before, to_bar, unserved_before
from refitd.surface.context import Service, ServiceOf
from refitd.surface.cursor import decode_cursor, encode_cursor
from refitd.surface.present import present_attempt, present_version
from refitd_client.contract.states import VersionState, WaitOutcome
from refitd_client.contract.wire import Attempt, Notice, Page, Rollback, Version, WaitResult

_NAMED = 5  # versions that a refusal offers; the others it counts

router = APIRouter(prefix="/v1", tags=["versions"])


@router.post("/versions", status_code=202, responses={200: {"model": Version, "description": "It is known already"}})
async def announce(notice: Notice, service: ServiceOf, response: Response) -> Version:
    """ "Weights ready": take a version in. 202 when it is new, 200 when it is known, 409 when its content is other."""
    record, new = await service.intake.take(notice)
    response.status_code = 202 if new else 200
    return _present(service, record)


@router.get("/versions")
async def list_versions(
    service: ServiceOf,
    run: str | None = None,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
) -> Page[Version]:
    """Versions, newest first."""
    wanted, before = _state(state), decode_cursor(cursor)

    def query() -> list[VersionRecord]:
        return service.ledger.journal.read(
            lambda connection: reads.read_versions(connection, run=run, state=wanted, before=before, limit=limit + 1)
        )

    await service.ledger.durable()  # so that a reader sees what it has just been told
    found = await asyncio.to_thread(query)
    more = encode_cursor(found[limit - 1]) if len(found) > limit else None
    return Page(items=[_present(service, record) for record in found[:limit]], next_cursor=more)


@router.get("/versions/{version_id}")
async def get_version(version_id: str, service: ServiceOf) -> Version:
    """One version."""
    return _present(service, await find(service, version_id))


@router.get("/versions/{version_id}/attempts")
async def list_attempts(
    version_id: str, service: ServiceOf, limit: Annotated[int, Query(ge=1, le=1000)] = 500
) -> Page[Attempt]:
    """How engines were brought to a version: each load with the time of its stages, in the order that they began."""
    record = await find(service, version_id)
    await service.ledger.durable()
    found = await asyncio.to_thread(
        service.ledger.journal.read,
        lambda connection: reads.read_attempts(connection, version=record.id, limit=limit),
    )
    return Page(items=[present_attempt(attempt) for attempt in found])


@router.get("/versions/{version_id}/wait")
async def wait(
    version_id: str,
    service: ServiceOf,
    wait_for: Annotated[Literal["served", "sealed", "taken"], Query(alias="for")] = "served",
    seconds: Annotated[float, Query(alias="timeout", ge=0, le=300)] = 30.0,
) -> WaitResult:
    """Wait until a version is served (or sealed), has failed or was superseded; "pending" when the time is up.

    "taken": until nobody copies it from its trainer's memory any more, or will.
    """
    deadline = service.ledger.clock.monotonic() + seconds
    seen = service.ledger.bell.count
    while True:
        record = await find(service, version_id)
        outcome = _outcome(service, record, WaitOutcome(wait_for))
        left = deadline - service.ledger.clock.monotonic()
        if outcome is not WaitOutcome.PENDING or left <= 0:
            await service.ledger.durable()  # a trainer that hears "served" may delete what it wrote
            return WaitResult(outcome=outcome, version=_present(service, record))
        seen = await service.ledger.bell.after(seen, within=left)


@router.put("/versions/{version_id}/pin")
async def pin(version_id: str, service: ServiceOf) -> Version:
    """Keep a version until it is unpinned."""
    return await _set_pin(service, version_id, pinned=True)


@router.delete("/versions/{version_id}/pin")
async def unpin(version_id: str, service: ServiceOf) -> Version:
    """Leave a version to the keep rules again."""
    return await _set_pin(service, version_id, pinned=False)


@router.post("/rollback")
async def rollback(order: Rollback, service: ServiceOf) -> Version:
    """Roll forward to an earlier good version: what is newer is barred, versions that come later roll as usual."""
    versions = service.ledger.versions_of(order.run)
    if not versions:
        raise ProblemError(Kind.UNKNOWN_RUN, f"no version of run {order.run} is known")
    current = service.ledger.goals(order.run).target
    if current is None:
        raise ProblemError(Kind.NOTHING_TO_ROLL_BACK, f"run {order.run} has no good version")
    goal = await _goal(service, order) or last_good_before(versions, current)
    if goal is None:
        raise ProblemError(Kind.NOTHING_TO_ROLL_BACK, _nowhere(current, unserved_before(versions, current)))
    for version in to_bar(versions, goal):
        service.ledger.put_version(replace(version, barred=True), f"barred: run {order.run} rolls back to {goal.id}")
    await service.ledger.durable()
    return _present(service, goal)


def _outcome(service: Service, record: VersionRecord, wait_for: WaitOutcome) -> WaitOutcome:
    ledger = service.ledger
    target = ledger.goals(record.run).target
    proven = target is not None and is_proven(target.id, ledger.engines_of(record.run), service.settings.quorum)
    refused = ledger.carriage.is_refused(record)
    offered = ledger.is_offered(record)
    return outcome_of(record, target, wait_for, proven=proven, refused=refused, offered=offered)


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


async def _goal(service: Service, order: Rollback) -> VersionRecord | None:
    if order.to is None:
        return None
    to = await find(service, order.to)
    if to.run != order.run or to.state is not VersionState.SEALED or to.barred:
        why = "is barred for good: it was rolled back from" if to.barred else f"is {to.state}, of run {to.run}"
        what = f"roll back to a SEALED version of run {order.run} that is not barred"
        raise ProblemError(Kind.VERSION_NOT_GOOD, f"{to.id} {why}; {what}, or publish its weights as the next step")
    return to


async def _set_pin(service: Service, version_id: str, *, pinned: bool) -> Version:
    record = await find(service, version_id)
    if record.state in {VersionState.DELETED, VersionState.RETIRED} and pinned:
        raise ProblemError(Kind.VERSION_NOT_GOOD, f"{record.id} is {record.state}: it is too late to keep it")
    if record.pinned is not pinned:
        record = replace(record, pinned=pinned)
        service.ledger.put_version(record, "pinned" if pinned else "unpinned")
    await service.ledger.durable()
    return _present(service, record)


async def find(service: Service, version_id: str) -> VersionRecord:
    """A version by its id, also one that was deleted.

    Raises:
        ProblemError: there is none.
    """
    record = await service.ledger.find(version_id)
    if record is None:
        raise ProblemError(Kind.UNKNOWN_VERSION, f"no version {version_id}: 'refitd versions' lists what there is")
    return record


def _present(service: Service, record: VersionRecord) -> Version:
    ledger, copier = service.ledger, service.copier
    return present_version(
        record,
        ledger.engines.values(),
        rollout=ledger.rollouts.get(record.run),
        refused=ledger.carriage.refused.get(record.id),
        waits_for=None if copier is None else copier.why_waiting(record),
    )


def _state(state: str | None) -> VersionState | None:
    if state is None:
        return None
    try:
        return VersionState(state.upper())
    except ValueError:
        raise ProblemError(Kind.BAD_REQUEST, f"state {state!r} is none of {', '.join(VersionState)}") from None
