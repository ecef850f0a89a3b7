"""The sweep: asks `keep` which versions are not needed, and deletes them one at a time.

Each version goes through the same steps, so that whatever arrives meanwhile is seen, and the next sweep goes on after a
kill at any point:

    examine the folder        which one is meant, by number and not by name, and which files in it are the version's
    ask again                 a reader, a rollback or a pin may have come since the plan was made
    retire, without an await  from here on nothing starts to need it; a kill leaves it RETIRED, and it is found again
    wait until that is durable
    ask again                 what came during that wait still counts
    discard                   one rename into the trash; a kill after it leaves a RETIRED version without a folder.
                              Where files of others lie in the folder too, the version's files alone, one by one
    make it a slot            if its publisher may write the next version into its files
    deleted
    empty the trash           at the end, and at the start of the next sweep after a kill

A delta goes before what it stands on, and a base stays while there is one that did not go: between the last question
and the rename the newest version may turn out to be lost, and what is left then, to be served instead, is all whole.

Slots that are not needed are deleted.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from refitd.clock import Clock
from refitd.policy.holdings import Found, Holdings, Weight, Weights, wants_look, weigh, weight_of
from refitd.policy.keep import SPARED, KeepRules, KeepVerdict, before_their_bases, keep, standing_on
from refitd.policy.leases import leases, why_not_deleted
from refitd.policy.lines import (
    KeptKind,
    bytes_by_kind,
    incoming_line,
    left_line,
    over_budget,
    plan_of,
    too_small,
    trash_lines,
    version_line,
    with_reasons,
)
from refitd.policy.readiness import Withheld
from refitd.policy.spare_slots import ReclaimRules, SlotRules, SlotVerdict, newest_full, spare, why_not
from refitd.reclaim.books import Books
from refitd.reclaim.folders import DiskFolders
from refitd.root.scan import Discarded, Gone, Incoming, Listing, ListingFailed, Refused
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import version_id
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan
from refitd_client.validation.foreign import is_foreign

PACE_SECONDS = 1.0  # between two sweeps
OVER_BUDGET_FOR = 60.0  # seconds before that is said: while a version has no verdict the root may be over its budget
AGE_STEP = 600.0  # seconds by which evidence grows older before that is written down

log = structlog.get_logger("refitd")


class CopySweep(Protocol):
    """Deletes the copies that no run needs, as `Materializer` does. `bytes_on_root` is what copies take."""

    @property
    def bytes_on_root(self) -> int: ...

    async def plan(self) -> list[Reclaimable]: ...

    async def sweep(self) -> list[Reclaimable]: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a look at the root found: what versions take, what is being written, and where versions were deleted."""

    weights: Weights = field(default_factory=dict[str, Weight])
    incoming: Sequence[Incoming] = ()
    left: Sequence[tuple[str, Holdings]] = ()

    def weight(self, version: VersionRecord) -> Weight:
        """What a version takes; one that came after the look counts from the next look on."""
        return self.weights.get(version.id, Weight(bytes=version.files.bytes))


class Sweeper:
    """Plans and runs sweeps of one root, one at a time. `kept` is what the last one left there, in bytes."""

    def __init__(
        self,
        folders: DiskFolders,
        books: Books,
        clock: Clock,
        *,
        rules: KeepRules,
        slots: SlotRules | None = None,
        copies: CopySweep | None = None,
    ) -> None:
        """Do nothing yet. Without `slots` nothing is recycled."""
        self.kept: Mapping[KeptKind, int] = dict.fromkeys(KeptKind, 0)
        self.copies = copies
        self._folders = folders
        self._books = books
        self._clock = clock
        self._rules = rules
        self._recycler = Recycler(folders, books, clock, slots or SlotRules(off="slots are off"), self._used)
        self._recycles = slots is not None
        self._evidence_since: dict[str, float] = {}
        self._seen = _Seen()
        self._over_since: float | None = None
        self._stuck = 0
        self._turn = asyncio.Lock()

    def recycle_nothing(self, why: str) -> None:
        """Make no slots of versions that are deleted. `why`: as the end of a sentence."""
        self._recycler.rules = replace(self._recycler.rules, off=why)

    async def plan(self) -> ReclaimPlan:
        """Say what a sweep would delete and keep, and why. Deletes nothing. Raises OSError."""
        listing = await self._books.listing()
        seen = await self._observe(listing)
        if not self._turn.locked():  # a sweep that runs goes by what it has seen itself
            self._seen = seen
        verdicts = self._verdicts(listing, seen)
        going = [verdict.record.path for verdict in verdicts if not verdict.keep]
        found = await self._folders.weigh(going) if going else {}  # not all that lies in their folders may go
        lines = [_planned_line(verdict, found.get(verdict.record.path), seen) for verdict in verdicts]
        lines += [left_line(path, holdings) for path, holdings in seen.left]
        lines += [incoming_line(each) for each in seen.incoming]
        if self._known(listing) is not None:
            lines += [slot_line(verdict) for verdict in await self._recycler.plan()]
            lines += [] if self.copies is None else await self.copies.plan()
            lines += trash_lines(*await self._folders.trash_room(), None)
        return plan_of(lines, self._rules.disk_budget, done=False)

    async def run(self) -> ReclaimPlan:
        """Sweep, and say what was deleted and kept, and why. Waits for a sweep that runs already.

        When cancelled it finishes the one step it is at; the next sweep goes on from there.

        Raises:
            OSError: the root cannot be read.
            JournalError: nothing is deleted before it is written down.
        """
        async with self._turn:
            listing = await self._books.listing()
            if self._known(listing) is not None:  # a killed sweep left it; what cannot be deleted counts in the budget
                emptied = await self._folders.empty()
                self._stuck = (await self._folders.trash_room())[0] if emptied.left else 0
            self._seen = seen = await self._observe(listing)
            self._write_sizes_and_ages()
            lines = [await self._settle_incoming(each) for each in seen.incoming]  # before anything that a run needs
            planned = {verdict.record.id: verdict for verdict in self._verdicts(listing, seen)}
            turns = before_their_bases([verdict.record for verdict in planned.values()])
            lines += [await self._settle(planned[version], listing) for version in turns]
            lines += [left_line(path, holdings) for path, holdings in seen.left]
            if self._known(listing) is not None:
                lines += await self._recycler.run()
                lines += [] if self.copies is None else await self.copies.sweep()
                # After the versions: a version without its manifest would not be loaded.
                await self._folders.forget_manifests([version.path for version in self._books.versions()])
                emptied = await self._folders.empty()
                lines += trash_lines(*await self._folders.trash_room(), emptied.left)
            self.kept = bytes_by_kind(lines)
            done = plan_of(lines, self._rules.disk_budget, done=True)
            now, fault = self._clock.monotonic(), over_budget(done)
            self._over_since = None if fault is None else now if self._over_since is None else self._over_since
            is_late = self._over_since is not None and now - self._over_since >= OVER_BUDGET_FOR
            good = [v for v in self._books.versions() if v.state is VersionState.SEALED and not self._rules.spares(v)]
            largest = max((version.files.bytes or 0 for version in good), default=0)
            never_fits = too_small(done, largest, await self._folders.free())
            self._books.budgeted(never_fits or (fault if is_late else None))
            return done

    async def why_not_deleted(self, run: str) -> str | None:
        """Why a run may not be deleted now, and what to do; None if it may. Raises OSError."""
        is_published = await self._folders.is_published(run)
        versions = [version for version in self._books.versions() if version.run == run]
        own = [v.path for v in versions if self._rules.spares(v) and v.state is not VersionState.LOST]
        found = await self._folders.weigh(own)
        own = [path for path in own if not isinstance(found[path], Gone)]  # a rejected one may be deleted by now
        return why_not_deleted(run, versions, self._books.views(), own, is_published=is_published)

    async def _observe(self, listing: Listing | ListingFailed | Withheld) -> _Seen:
        """Weigh the folders whose size is in no record, then look at what is being written.

        In this order, a folder that is published in between counts at most once.
        """
        versions, known = self._books.versions(), self._known(listing)
        if known is None:
            return _Seen(weigh(versions, {}, self._rules.spares))
        taken, gone = {version.path for version in versions}, self._books.gone()
        left = [  # the folders whose versions were deleted
            found.path
            for found in known.found
            if found.path not in taken and not is_foreign(found.path) and version_id(found.run, found.order) in gone
        ]
        wanted = [*(version.path for version in versions if wants_look(version)), *left]
        found = await self._folders.weigh(wanted) if wanted else {}
        weights = weigh(versions, found, self._rules.spares)
        runs = sorted(known.runs | {version.run for version in versions})
        incoming = await self._folders.survey(runs)
        there = ((path, found.get(path)) for path in left)
        return _Seen(weights, incoming, [(path, each) for path, each in there if isinstance(each, Holdings)])

    def _write_sizes_and_ages(self) -> None:
        """Write down sizes and ages, so that a service that restarts goes on from there. The age of a version that
        becomes evidence for a second time begins at 0.
        """
        versions = self._books.versions()
        ages = self._ages(versions)
        for version in versions:
            size = self._seen.weight(version).bytes
            is_sized_here = version.state in {VersionState.REJECTED, VersionState.UNKNOWN}
            if is_sized_here and size is not None and size != version.files.bytes:
                self._books.sized(version.id, size)
            age = ages.get(version.id, 0.0)
            if age - version.verdict.bad_for >= AGE_STEP or age < version.verdict.bad_for:
                self._books.aged(version.id, age)

    def _verdicts(self, listing: Listing | ListingFailed | Withheld, seen: _Seen) -> list[KeepVerdict]:
        versions, views = self._books.versions(), self._books.views()
        return keep(
            versions,
            leases(views),
            self._rules,
            listing=listing,
            ages=self._ages(versions),
            weights=seen.weights,
            beside=self._beside(seen),
            closed=views.closed,
            followed={engine.run for engine in views.engines if engine.run is not None and not engine.is_removed},
        )

    def _known(self, listing: Listing | ListingFailed | Withheld) -> Listing | None:
        """The listing, None where nothing may be deleted by it: it failed, is withheld, or is empty though versions are
        known. What a kill has left of deleted ones needs no listing.
        """
        known = any(version.state is not VersionState.RETIRED for version in self._books.versions())
        return listing if isinstance(listing, Listing) and (listing.found or not known) else None

    def _beside(self, seen: _Seen) -> dict[str, int]:
        copies = 0 if self.copies is None else self.copies.bytes_on_root
        written = sum(each.bytes or 0 for each in seen.incoming if not each.abandoned)
        return {"copies for deltas": copies, "what is being written": written, "the trash": self._stuck}

    def _used(self) -> int:
        """The bytes of the disk budget that everything but slots takes now."""
        weights = self._seen.weights
        versions = sum(weights.get(version.id, Weight()).counted for version in self._books.versions())
        return versions + sum(self._beside(self._seen).values())

    def _ages(self, versions: Iterable[VersionRecord]) -> dict[str, float]:
        """For how many seconds each version has been evidence, by the monotonic clock. The time in which the service
        did not run does not count.
        """
        now = self._clock.monotonic()
        seen = self._evidence_since
        self._evidence_since = {v.id: seen.get(v.id, now - v.verdict.bad_for) for v in versions if v.state.is_bad}
        return {version: now - since for version, since in self._evidence_since.items()}

    def _verdict_of(self, version: str, listing: Listing | ListingFailed | Withheld) -> KeepVerdict | None:
        """The verdict as of now, None where something else deleted the version meanwhile."""
        verdict = next(
            (verdict for verdict in self._verdicts(listing, self._seen) if verdict.record.id == version), None
        )
        above = [] if verdict is None or verdict.keep else standing_on(verdict.record, self._books.versions())
        if verdict is None or not above:
            return verdict
        return replace(verdict, keep=True, reasons=(f"{above[0].id} stands on it, and goes first",))

    async def _settle(self, verdict: KeepVerdict, listing: Listing | ListingFailed | Withheld) -> Reclaimable:
        record = verdict.record
        if verdict.keep:
            return version_line(verdict, self._seen.weight(record))
        folder = await self._folders.examine(record.path)
        if isinstance(folder, Holdings):
            came_back = self._rules.spares(record)  # a trainer's own folder that was not there when the root was listed
            folder = Refused(record.path, SPARED) if came_back else _refusal(record, folder) or folder
        if isinstance(folder, Refused):
            return version_line(KeepVerdict(record, keep=True, reasons=(folder.reason,)), self._seen.weight(record))
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return version_line(now or verdict, self._seen.weight(record))
        if now.record.state is not VersionState.RETIRED:
            self._books.retire(now.record, "; ".join(now.reasons))  # nothing is awaited between the question and this
        await self._books.durable()
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return version_line(now or verdict, self._seen.weight(record))
        return await self._discard(replace(verdict, record=now.record), folder)  # the reasons of the plan say more

    async def _discard(self, verdict: KeepVerdict, folder: Holdings | Gone) -> Reclaimable:
        record = verdict.record
        if isinstance(folder, Gone):
            self._books.deleted(record)
            return version_line(verdict, Weight(bytes=0))
        weight = weight_of(record, folder, is_spared=False)
        outcome = await self._folders.discard(record.path, folder) if folder.files else Gone(record.path)
        if isinstance(outcome, Refused):
            return version_line(KeepVerdict(record, keep=True, reasons=(outcome.reason,)), weight)
        refusal = None
        if isinstance(outcome, Discarded) and self._recycles and not folder.others:
            refusal = await self._recycler.take_over(record, outcome)
            if refusal is None:  # nothing was freed
                refusal, weight = "its files are a free slot now", Weight()
        self._books.deleted(record)
        return version_line(with_reasons(verdict, refusal, folder.rest), weight)

    async def _settle_incoming(self, found: Incoming) -> Reclaimable:
        if not found.abandoned:
            return incoming_line(found)
        outcome = await self._folders.discard_abandoned(found.path)
        if isinstance(outcome, Refused):
            return replace(incoming_line(found), keep=True, reasons=[outcome.reason])
        return incoming_line(found)


def _refusal(record: VersionRecord, folder: Holdings) -> Refused | None:
    """Why nothing of a folder may be deleted. The proof of a RETIRED version may be deleted already."""
    if folder.refusal is None or record.state is VersionState.RETIRED:
        return None
    return Refused(record.path, folder.refusal)


def _planned_line(verdict: KeepVerdict, found: Found | None, seen: _Seen) -> Reclaimable:
    if verdict.keep or not isinstance(found, Holdings):
        return version_line(verdict, seen.weight(verdict.record))
    weight = weight_of(verdict.record, found, is_spared=False)
    if (refusal := _refusal(verdict.record, found)) is not None:
        return version_line(KeepVerdict(verdict.record, keep=True, reasons=(refusal.reason,)), weight)
    return version_line(with_reasons(verdict, found.rest), weight)


class Collector:
    """Sweeps when something has changed, and from time to time."""

    def __init__(
        self,
        store: Store,
        books: Books,
        folders: DiskFolders,
        rules: ReclaimRules,
        copies: CopySweep | None = None,
    ) -> None:
        self._store = store
        self._interval = rules.interval
        self._books = books
        self.sweeper = Sweeper(folders, books, store.clock, rules=rules.keep, slots=rules.slots, copies=copies)

    async def run(self) -> None:
        """Sweep until cancelled."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen, within=self._interval)
            try:
                if not self._store.origin.rebuilt and self._books.rebuilding() is None:
                    self._store.rebuilt()
                await self.sweeper.run()
            except (OSError, JournalError) as error:
                log.warning("nothing was reclaimed this time", error=str(error))
            await asyncio.sleep(PACE_SECONDS)


_NUMBERS = re.compile(r"\d+")


class Recycler:
    """Belongs to one sweeper, which calls it in its turn. `used` are the bytes of the disk budget that all but slots
    take.
    """

    def __init__(
        self, folders: DiskFolders, books: Books, clock: Clock, rules: SlotRules, used: Callable[[], int]
    ) -> None:
        self._folders = folders
        self._books = books
        self._clock = clock
        self.rules = rules
        self._used = used
        self._since: dict[str, float] = {}
        self._layouts: dict[str, str | None] = {}
        self._told: set[str] = set()

    async def take_over(self, record: VersionRecord, discarded: Discarded) -> str | None:
        """Make a slot of a version that was discarded; return why not, None where it is one now."""
        refusal = await self._refusal(record)
        if refusal is None:
            # One question is enough: the version is RETIRED, so nothing begins to need it.
            found = await self._folders.hand_back(discarded, record.run)
            refusal = found.reason if isinstance(found, Refused) else None
        if refusal is None:
            return None
        kind = _NUMBERS.sub("#", refusal)  # the same reason names another version each time
        if kind not in self._told:
            self._told.add(kind)
            log.info("a version's files are not recycled", version=record.id, reason=refusal)
        return f"its files are not recycled: {refusal}"

    async def plan(self) -> list[SlotVerdict]:
        slots = await self._folders.slots()
        if not slots:
            self._since.clear()
            return []
        now = self._clock.monotonic()
        self._since = {slot.path: self._since.get(slot.path, now) for slot in slots}
        ages = {path: now - since for path, since in self._since.items()}
        newest, closed = await self._newest(), self._books.views().closed
        return spare(slots, newest, self.rules, used=self._used(), ages=ages, closed=closed)

    async def run(self) -> list[Reclaimable]:
        """Delete the slots that are not needed, and say of each slot why it goes or stays."""
        return [await self._settle(verdict) for verdict in await self.plan()]

    async def _settle(self, verdict: SlotVerdict) -> Reclaimable:
        if not verdict.keep:
            outcome = await self._folders.withdraw(verdict.slot)
            if isinstance(outcome, Refused):
                return slot_line(SlotVerdict(verdict.slot, keep=True, reason=outcome.reason))
        return slot_line(verdict)

    async def _refusal(self, record: VersionRecord) -> str | None:
        if self.rules.off is not None:
            return self.rules.off
        if record.run in self._books.views().closed:
            return f"run {record.run} is closed"
        layout = (await self._newest()).get(record.run)
        if layout is None:
            return f"no newer version of run {record.run} could be written into them"
        mine = [slot for slot in await self._folders.slots() if slot.run == record.run and slot.layout == layout]
        if len(mine) >= self.rules.count:
            return f"run {record.run} has {len(mine)} free slots"
        return why_not(record, self._books.views())

    async def _newest(self) -> dict[str, str | None]:
        """The layouts of the newest versions. A version never changes, so each is looked at once."""
        newest = {version.run: version for version in newest_full(self._books.versions())}
        known = {version.id: self._layouts.get(version.id) for version in newest.values()}
        for version in newest.values():
            if known[version.id] is None:
                known[version.id] = await self._folders.layout(version.path)
        self._layouts = known
        return {run: known[version.id] for run, version in newest.items()}


def slot_line(verdict: SlotVerdict) -> Reclaimable:
    slot = verdict.slot
    foreign = 0 if slot.ours else slot.bytes
    return Reclaimable(
        path=slot.path, keep=verdict.keep, reasons=[verdict.reason], bytes=slot.bytes, foreign_bytes=foreign
    )
