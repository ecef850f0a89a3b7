"""Routes of versions: the notice, lists, waiting, pins."""

import asyncio
import base64
import binascii
from contextlib import ExitStack
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from refitd.api.context import Service, ServiceOf, find_version, ids_of_step, leave_to_upstream
from refitd.api.limits import WaitingRequests
from refitd.explain.present import orders_of_hosts, present_attempt, present_version
from refitd.policy.goals import passed_over, question_about
from refitd.policy.traffic import is_proven, outcome_of
from refitd.problem import ProblemError, Slug
from refitd.state.journal import rows
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd_client.contract.decoding import from_json
from refitd_client.contract.states import VersionState, WaitOutcome
from refitd_client.contract.wire import MAX_BARRED, Attempt, Notice, Page, Version, VersionPage, WaitResult

MANY_ENGINES = 100
_CLIENT_LOOK_SECONDS = 1.0  # between looks at whether a client still waits

router = APIRouter(prefix="/v1", tags=["versions"])


@router.post("/versions", status_code=202, responses={200: {"model": Version, "description": "It is known already"}})
async def announce(notice: Notice, service: ServiceOf, response: Response) -> Version:
    """ "Weights ready": take a version in. 202 when it is new, 200 when it is known, 409 when its content is other."""
    record, new = await service.intake.take(notice)
    response.status_code = 202 if new else 200
    if new and (why := service.hosts.why_they_stay(record)) is not None:
        service.store.say("version", record.id, why, is_fault=True, of_run=record.run)
    return presented(service, record)


async def _read(
    journal: Journal, run: str | None, state: VersionState | None, before: rows.ListPlace | None, limit: int
) -> list[VersionRecord]:
    """Versions as `rows.read_versions` has them, with all that anyone was told before this call.

    Raises:
        JournalError: what was told is not on disk yet, or the database does not answer.
    """
    await journal.durable(told=True)
    return await asyncio.to_thread(
        journal.read,
        lambda connection: rows.read_versions(connection, run=run, state=state, before=before, limit=limit),
    )


@router.get("/versions", response_model=VersionPage)
async def list_versions(
    service: ServiceOf,
    run: str | None = None,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
    engines: bool = True,
) -> Response:
    """Versions, newest first: within one run by generation and step, across runs by when the service first saw them.

    A client that follows `next_cursor` to the end gets each version that was there at the start exactly once, whatever
    is published meanwhile.

    `engines=false` leaves the engines of each version out: with a thousand they are most of the answer, and the
    overview has them once.
    """
    wanted, journal = _state(state), service.store.journal
    found = await _read(journal, run, wanted, decode_cursor(cursor), limit + 1)
    more = encode_cursor(found[limit - 1]) if len(found) > limit else None
    items: list[msgspec.Raw] = []
    for record in found[:limit]:
        items.append(msgspec.Raw(msgspec.json.encode(presented(service, record, engines=engines))))
        if engines and len(service.store.engines) > MANY_ENGINES:
            await asyncio.sleep(0)  # others have their turn: each of these takes milliseconds
    root = _root_of(service.store)
    folder = None if root is None else str(service.values.root.resolve())
    refuses = service.intake.left_to_upstream("publish there")
    page: dict[str, object] = {"items": items, "next_cursor": more, "root": root, "folder": folder, "refuses": refuses}
    if run is not None:
        page["begins"] = service.store.runs.begins(run, service.store.index.newest_of(run))
        page["on_hosts"] = service.hosts.newest_unknown(run)
    if run is not None and wanted is VersionState.SEALED:  # as followers ask
        deleted = await _read(journal, run, VersionState.DELETED, None, MAX_BARRED)
        page["barred"] = [record.id for record in deleted if record.barred]
    return Response(msgspec.json.encode(page), media_type="application/json")


def _root_of(store: Store) -> str | None:
    """The root's name, unless it cannot be listed now: then another folder may lie at its path."""
    mark = store.origin.root
    return None if mark is None or store.faults.root is not None else mark.name


@router.get("/versions/{version_id}")
async def get_version(version_id: str, service: ServiceOf) -> Version:
    """One version."""
    return presented(service, await find_version(service, version_id))


@router.get("/versions/{version_id}/attempts")
async def list_attempts(
    version_id: str, service: ServiceOf, limit: Annotated[int, Query(ge=1, le=1000)] = 500
) -> Page[Attempt]:
    """How engines were brought to a version: each load with the time of its stages, in the order that they began."""
    record = await find_version(service, version_id)
    await service.store.durable()
    found = await asyncio.to_thread(
        service.store.journal.read,
        lambda connection: rows.read_attempts(connection, version=record.id, limit=limit),
    )
    return Page(items=[present_attempt(attempt) for attempt in found])


@router.get("/versions/{version_id}/wait")
async def wait(
    version_id: str,
    service: ServiceOf,
    request: Request,
    wait_for: Annotated[Literal["served", "sealed", "taken"], Query(alias="for")] = "served",
    seconds: Annotated[float, Query(alias="timeout", ge=0, le=300)] = 30.0,
) -> WaitResult:
    """Wait until a version is served (or sealed), has failed or was superseded; "pending" when the time is up.

    "taken": until no engine copies it from its trainer's memory any more, or will. 503 while as many requests wait as
    the service, or this client, may have; what is known already is answered all the same.
    """
    deadline = service.store.clock.monotonic() + seconds
    seen = service.store.changed.count
    with ExitStack() as held:
        is_held = False
        while True:
            record = await find_version(service, version_id)
            outcome = _outcome(service, record, WaitOutcome(wait_for))
            left = deadline - service.store.clock.monotonic()
            if outcome is not WaitOutcome.PENDING or left <= 0:
                break
            if not is_held:
                waiting: WaitingRequests = request.app.state.waiting
                held.enter_context(waiting.slot(request))
                is_held = True
            seen = await service.store.changed.wait_after(seen, within=min(left, _CLIENT_LOOK_SECONDS))
            if await request.is_disconnected():
                break  # its place is another's
    await service.store.durable()  # a trainer that hears "served" may delete what it wrote
    followers = service.hosts.of_run(record.run)
    return WaitResult(outcome=outcome, version=presented(service, record), followers=followers)


@router.put("/versions/{version_id}/pin")
async def pin(version_id: str, service: ServiceOf) -> Version:
    """Keep a version until it is unpinned. A step does for an id where only one version has it.

    409 on a host that follows an upstream which has the version, and says whether it is pinned: pin it there. One that
    the upstream has no more is pinned here.
    """
    return await _set_pin(service, version_id, pinned=True)


@router.delete("/versions/{version_id}/pin")
async def unpin(version_id: str, service: ServiceOf) -> Version:
    """Leave a version to the keep rules again. On a host that follows an upstream it is refused as a pin is."""
    return await _set_pin(service, version_id, pinned=False)


def _outcome(service: Service, record: VersionRecord, wait_for: WaitOutcome) -> WaitOutcome:
    store, targets = service.store, service.targets
    target = targets.of_run(record.run).target
    proven = target is not None and is_proven(target.id, store.engines_of(record.run), service.values.quorum)
    refused = targets.carriage.is_refused(record)
    offered = targets.is_offered(record)
    return outcome_of(record, target, wait_for, proven=proven, refused=refused, offered=offered)


def _meant(store: Store, word: str) -> str:
    """The id of the version that a step or a folder's name means; the word itself where it means none.

    Raises:
        ProblemError: it may be several.
    """
    found = ids_of_step(word, store)
    if len(found) > 1:
        raise ProblemError(Slug.UNKNOWN_VERSION, f"{word} may be {len(found)} versions: {listed(found)}")
    return found[0] if found else word


async def _set_pin(service: Service, version_id: str, *, pinned: bool) -> Version:
    record = await find_version(service, _meant(service.store, version_id))
    leave_to_upstream(service, f"{'pin' if pinned else 'unpin'} {record.id}", lambda up: up.decides_pin(record))
    if record.state.is_over and pinned:
        raise ProblemError(Slug.VERSION_NOT_GOOD, f"{record.id} is {record.state}: it is too late to keep it")
    if record.pinned is not pinned:
        record = record.having(pinned=pinned)
        service.store.put_version(record, "pinned" if pinned else "unpinned")
    await service.decided()
    return presented(service, record)


def presented(service: Service, record: VersionRecord, *, engines: bool = True) -> Version:
    """Return a version as the API shows it; with the engines of its run, unless they are not wanted."""
    store = service.store
    on = store.engines_of(record.run) if engines else []
    return present_version(
        record,
        on,
        update=store.updates.get(record.run),
        hosts=orders_of_hosts(on, store),
        refused=service.targets.carriage.refused.get(record.id),
        waits_for=_why_waiting(service, record),
    )


def _why_waiting(service: Service, record: VersionRecord) -> str | None:
    """What a delta waits for, or what an operator is asked about a step that appeared after a later one."""
    target, copies = service.targets.of_run(record.run).target, service.copies
    known = service.store.versions_of(record.run) if record.announced.after is not None else []
    if target is not None and passed_over(known, target) == record:
        return question_about(record, target)
    return None if copies is None else copies.why_waiting(record)


def _state(state: str | None) -> VersionState | None:
    if state is None:
        return None
    try:
        return VersionState(state.upper())
    except ValueError:
        raise ProblemError(Slug.BAD_REQUEST, f"state {state!r} is none of {', '.join(VersionState)}") from None


# What the journal's database can compare with: `created_at`, generation, step and run of the last version of a page.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=1000, pattern="^[ -~]*$")]
_Cursor = tuple[_Text, _Number, _Number, _Text]


def encode_cursor(last: VersionRecord) -> str:
    """Return the cursor behind `last`."""
    at = (last.created_at, last.order.generation, last.order.step, last.run)
    return base64.urlsafe_b64encode(msgspec.json.encode(at)).decode()


def decode_cursor(cursor: str | None) -> rows.ListPlace | None:
    """Return the place in lists that a cursor stands for.

    Raises:
        ProblemError: it is none that a page gave.
    """
    if cursor is None:
        return None
    try:
        return from_json(base64.urlsafe_b64decode(cursor.encode()), _Cursor)
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise ProblemError(Slug.BAD_REQUEST, "cursor: take it from next_cursor of the page before") from error
