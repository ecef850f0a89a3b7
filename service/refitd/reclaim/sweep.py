"""The sweep: asks `keep` what nobody needs, and takes it away one version at a time.

Each version goes through the same steps, so that whatever arrives meanwhile is seen, and a kill at any point is mended
by the next sweep:

    examine the folder        which one is meant, by number and not by name
    ask again                 a reader, a rollback or a pin may have come since the plan was made
    retire, without a pause   from here on nothing starts to need it; a kill leaves it RETIRED, and it is found again
    wait until that is durable
    ask again                 what came during that wait still counts
    discard                   one rename into the trash; a kill after it leaves a RETIRED version without a folder
    make it a slot            if its publisher may write the next version into its files: `refitd.reclaim.recycler`
    deleted
    empty the trash           at the end, and at the start of the next sweep after a kill

A delta goes before what it stands on, and a base stays while there is one that did not go: between the last question
and the rename the newest version may turn out to be lost, and what is left then, to be served instead, is all whole.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from refitd.catalog.record import VersionRecord
from refitd.catalog.scan import Listing, ListingFailed
from refitd.clock import Clock
from refitd.reclaim.folders import Folders
from refitd.reclaim.handle import Identity
from refitd.reclaim.incoming import Incoming
from refitd.reclaim.keep import EVIDENCE, SPARED, KeepRules, Verdict, keep
from refitd.reclaim.kept import Kept, bytes_by_reason
from refitd.reclaim.leases import Views, leases
from refitd.reclaim.needs import before_their_bases, standing_on
from refitd.reclaim.outcome import Discarded, Gone, Refused
from refitd.reclaim.rebuild import Withheld
from refitd.reclaim.recycler import Recycler, slot_line
from refitd.reclaim.spare import SlotRules
from refitd.reclaim.trash import TRASH
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

TRASH_PATH = f"{SERVICE_FOLDER}/{TRASH}"


class Facts(Protocol):
    """What is true now. Asked on the event loop, again and again: no answer is kept."""

    def versions(self) -> Sequence[VersionRecord]:
        """All versions that are not DELETED."""
        ...

    def views(self) -> Views:
        """What leases are made of."""
        ...

    async def listing(self) -> Listing | ListingFailed | Withheld:
        """Scan the root. Versions in folders of other names belong in it as well, if they are there.

        Withheld, while nothing may be deleted whatever is there.
        """
        ...


class Books(Protocol):
    """Where it is written down what happens to a version. A change takes effect in memory at once."""

    def retire(self, record: VersionRecord, why: str) -> None:
        """Make it RETIRED: no rollout, rollback or delta may begin to use it."""
        ...

    def deleted(self, record: VersionRecord) -> None:
        """Make it DELETED: its folder is gone from its place."""
        ...

    async def durable(self) -> None:
        """Wait until all that was written is on disk; raises when it cannot be."""
        ...


class CopySweep(Protocol):
    """Sees to copies: a run that publishes no deltas any more needs none. `refitd.copies.copier` does."""

    @property
    def bytes_on_root(self) -> int:
        """What they take of the root's room."""
        ...

    async def plan(self) -> list[Reclaimable]:
        """What would be taken away and kept, and why."""
        ...

    async def sweep(self) -> list[Reclaimable]:
        """Take it away."""
        ...


class Sweeper:
    """Plans and runs sweeps of one root, one at a time. `kept` is what the last one left there, in bytes."""

    def __init__(
        self,
        folders: Folders,
        facts: Facts,
        books: Books,
        clock: Clock,
        *,
        rules: KeepRules,
        incoming_ttl: float,
        slots: SlotRules | None = None,
        copies: CopySweep | None = None,
    ) -> None:
        """Do nothing yet. `incoming_ttl` is in seconds; without `slots` nothing is recycled."""
        self.kept: Mapping[Kept, int] = dict.fromkeys(Kept, 0)
        self._copies = copies
        self._folders = folders
        self._facts = facts
        self._books = books
        self._clock = clock
        self._rules = rules
        self._incoming_ttl = incoming_ttl
        self._recycler = Recycler(folders, facts, clock, slots or SlotRules(off="slots are off"), self._beside)
        self._recycles = slots is not None
        self._evidence_since: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def plan(self) -> ReclaimPlan:
        """Say what a sweep would delete and keep, and why. Deletes nothing.

        Raises:
            OSError: the root cannot be read.
        """
        listing = await self._facts.listing()
        lines = [_line(verdict) for verdict in self._verdicts(listing)]
        lines += [_incoming_line(found) for found in await self._survey(listing)]
        if _known(listing) is not None:
            lines += [slot_line(verdict) for verdict in await self._recycler.plan()]
            lines += [] if self._copies is None else await self._copies.plan()
        return _plan(lines, done=False)

    async def run(self) -> ReclaimPlan:
        """Sweep, and say what was deleted and kept, and why. Waits for a sweep that runs already.

        When cancelled it finishes the one step it is at; the next sweep goes on from there.

        Raises:
            OSError: the root cannot be read.
            Exception: what `Books.durable` raises; nothing is deleted that is not written down first.
        """
        async with self._turn:
            listing = await self._facts.listing()
            planned = {verdict.record.id: verdict for verdict in self._verdicts(listing)}
            turns = before_their_bases([verdict.record for verdict in planned.values()])
            lines = [await self._settle(planned[version], listing) for version in turns]
            lines += [await self._settle_incoming(found) for found in await self._survey(listing)]
            lines += await self._recycle(listing)
            lines += [] if self._copies is None or _known(listing) is None else await self._copies.sweep()
            lines += await self._empty(listing)
            self.kept = self._count(lines)
            return _plan(lines, done=True)

    def _count(self, lines: Iterable[Reclaimable]) -> dict[Kept, int]:
        versions = {version.id: version for version in self._facts.versions()}
        return bytes_by_reason(lines, versions, leases(self._facts.views()))

    def _verdicts(self, listing: Listing | ListingFailed | Withheld) -> list[Verdict]:
        versions, views = self._facts.versions(), self._facts.views()
        return keep(
            versions,
            leases(views),
            self._rules,
            listing=listing,
            ages=self._ages(versions),
            beside=self._beside(),
            closed={run.run for run in views.runs if run.is_closed},
        )

    def _beside(self) -> int:
        return 0 if self._copies is None else self._copies.bytes_on_root

    def _ages(self, versions: Iterable[VersionRecord]) -> dict[str, float]:
        """For how long evidence has been seen, by a clock that no administrator sets. A restart begins anew."""
        now = self._clock.monotonic()
        seen = self._evidence_since
        self._evidence_since = {v.id: seen.get(v.id, now) for v in versions if v.state in EVIDENCE}
        return {version: now - since for version, since in self._evidence_since.items()}

    def _verdict_of(self, version: str, listing: Listing | ListingFailed | Withheld) -> Verdict | None:
        """The verdict as of now, None where the version was deleted by someone else meanwhile."""
        verdict = next((verdict for verdict in self._verdicts(listing) if verdict.record.id == version), None)
        above = [] if verdict is None or verdict.keep else standing_on(verdict.record, self._facts.versions())
        if verdict is None or not above:
            return verdict
        return replace(verdict, keep=True, reasons=(f"{above[0].id} stands on it, and goes first",))

    async def _settle(self, verdict: Verdict, listing: Listing | ListingFailed | Withheld) -> Reclaimable:
        if verdict.keep:
            return _line(verdict)
        record = verdict.record
        folder = await self._folders.examine(record.path)
        if isinstance(folder, Identity) and self._rules.spares(record):
            folder = Refused(record.path, SPARED)  # it came back since it was listed
        if isinstance(folder, Refused):
            return _refused_line(record, folder)
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return _line(now or verdict)
        if now.record.state is not VersionState.RETIRED:
            self._books.retire(now.record, "; ".join(now.reasons))  # nothing is awaited between the question and this
        await self._books.durable()
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return _line(now or verdict)
        return await self._discard(replace(verdict, record=now.record), folder)  # the reasons of the plan say more

    async def _discard(self, verdict: Verdict, folder: Identity | Gone) -> Reclaimable:
        record = verdict.record
        if isinstance(folder, Identity):
            outcome = await self._folders.discard(record.path, folder)
            if isinstance(outcome, Refused):
                return _refused_line(record, outcome)
            if isinstance(outcome, Discarded) and self._recycles:
                refusal = await self._recycler.take_over(record, outcome)
                self._books.deleted(record)
                return _recycled_line(verdict) if refusal is None else _line(_told(verdict, refusal))
        self._books.deleted(record)
        return _line(verdict)

    async def _survey(self, listing: Listing | ListingFailed | Withheld) -> list[Incoming]:
        if (known := _known(listing)) is None:
            return []
        runs = sorted(known.runs | {version.run for version in self._facts.versions()})
        return await self._folders.survey(runs, self._incoming_ttl)

    async def _settle_incoming(self, found: Incoming) -> Reclaimable:
        if not found.abandoned:
            return _incoming_line(found)
        outcome = await self._folders.discard_abandoned(found.path, self._incoming_ttl)
        if isinstance(outcome, Refused):
            return replace(_incoming_line(found), keep=True, reasons=[outcome.reason])
        return _incoming_line(found)

    async def _recycle(self, listing: Listing | ListingFailed | Withheld) -> list[Reclaimable]:
        return [] if _known(listing) is None else await self._recycler.run()

    async def _empty(self, listing: Listing | ListingFailed | Withheld) -> list[Reclaimable]:
        if _known(listing) is None:
            return []
        emptied = await self._folders.empty()
        return [Reclaimable(path=TRASH_PATH, keep=True, reasons=[sentence]) for sentence in emptied.left]


def _known(listing: Listing | ListingFailed | Withheld) -> Listing | None:
    """A listing to go by: one that failed or is empty deletes nothing."""
    return listing if isinstance(listing, Listing) and listing.found else None


def _line(verdict: Verdict) -> Reclaimable:
    record = verdict.record
    return Reclaimable(
        path=record.path, keep=verdict.keep, reasons=list(verdict.reasons), version=record.id, bytes=record.bytes
    )


def _recycled_line(verdict: Verdict) -> Reclaimable:
    """A version that is gone and has freed nothing."""
    return replace(_line(_told(verdict, "its files are a free slot now")), bytes=None)


def _told(verdict: Verdict, sentence: str) -> Verdict:
    return replace(verdict, reasons=(*verdict.reasons, sentence))


def _refused_line(record: VersionRecord, refused: Refused) -> Reclaimable:
    return Reclaimable(path=record.path, keep=True, reasons=[refused.reason], version=record.id, bytes=record.bytes)


def _incoming_line(found: Incoming) -> Reclaimable:
    return Reclaimable(path=found.path, keep=not found.abandoned, reasons=[found.reason], bytes=found.bytes)


def _plan(lines: list[Reclaimable], *, done: bool) -> ReclaimPlan:
    freed = sum(line.bytes or 0 for line in lines if not line.keep)
    return ReclaimPlan(items=lines, freed_bytes=freed, done=done)
