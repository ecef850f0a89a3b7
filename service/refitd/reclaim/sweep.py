"""The sweep: asks `keep` what nobody needs, and takes it away one version at a time.

Each version goes through the same steps, so that whatever arrives meanwhile is seen, and a kill at any point is mended
by the next sweep:

    examine the folder        which one is meant, by number and not by name
    ask again                 a reader, a rollback or a pin may have come since the plan was made
    retire, without a pause   from here on nothing starts to need it; a kill leaves it RETIRED, and it is found again
    wait until that is durable
    ask again                 what came during that wait still counts
    discard                   one rename into the trash; a kill after it leaves a RETIRED version without a folder
    deleted
    empty the trash           at the end, and at the start of the next sweep after a kill
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from refitd.catalog.record import VersionRecord
from refitd.catalog.scan import Listing, ListingFailed
from refitd.clock import Clock
from refitd.reclaim import incoming, trash
from refitd.reclaim.handle import Identity, root_at
from refitd.reclaim.keep import EVIDENCE, KeepRules, Verdict, keep
from refitd.reclaim.leases import Views, leases
from refitd.reclaim.outcome import Gone, Refused
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

TRASH_PATH = f"{SERVICE_FOLDER}/{trash.TRASH}"
AnswerT = TypeVar("AnswerT")


class Facts(Protocol):
    """What is true now. Asked on the event loop, again and again: no answer is kept."""

    def versions(self) -> Sequence[VersionRecord]:
        """All versions that are not DELETED."""
        ...

    def views(self) -> Views:
        """What leases are made of."""
        ...

    async def listing(self) -> Listing | ListingFailed:
        """Scan the root. Versions in folders of other names belong in it as well, if they are there."""
        ...


class Books(Protocol):
    """Where it is written down what happens to a version. A change takes effect in memory at once."""

    def retire(self, record: VersionRecord) -> None:
        """Make it RETIRED: no rollout, rollback or delta may begin to use it."""
        ...

    def deleted(self, record: VersionRecord) -> None:
        """Make it DELETED: its folder is gone from its place."""
        ...

    async def durable(self) -> None:
        """Wait until all that was written is on disk; raises when it cannot be."""
        ...


class Examine(Protocol):
    """How a version's folder is recognised (in a worker thread); whoever knows its signature can compare that too."""

    def __call__(self, root: int, record: VersionRecord) -> Identity | Gone | Refused:
        """Say which folder it is, that it is gone, or why it must not be touched."""
        ...


def examine_folder(root: int, record: VersionRecord) -> Identity | Gone | Refused:
    """Take whatever folder lies at the version's path."""
    return trash.examine(root, record.path)


class Sweeper:
    """Plans and runs sweeps of one root, one at a time."""

    def __init__(
        self,
        root: Path,
        facts: Facts,
        books: Books,
        clock: Clock,
        *,
        rules: KeepRules,
        incoming_ttl: float,
        examine: Examine = examine_folder,
    ) -> None:
        """Do nothing yet. `incoming_ttl` is in seconds."""
        self._root = root
        self._facts = facts
        self._books = books
        self._clock = clock
        self._rules = rules
        self._incoming_ttl = incoming_ttl
        self._examine = examine
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
            lines = [await self._settle(verdict, listing) for verdict in self._verdicts(listing)]
            lines += [await self._settle_incoming(found) for found in await self._survey(listing)]
            lines += await self._empty(listing)
            return _plan(lines, done=True)

    def _verdicts(self, listing: Listing | ListingFailed) -> list[Verdict]:
        versions = self._facts.versions()
        held = leases(self._facts.views())
        return keep(versions, held, self._rules, listing=listing, ages=self._ages(versions))

    def _ages(self, versions: Iterable[VersionRecord]) -> dict[str, float]:
        """For how long evidence has been seen, by a clock that no administrator sets. A restart begins anew."""
        now = self._clock.monotonic()
        seen = self._evidence_since
        self._evidence_since = {v.id: seen.get(v.id, now) for v in versions if v.state in EVIDENCE}
        return {version: now - since for version, since in self._evidence_since.items()}

    def _verdict_of(self, version: str, listing: Listing | ListingFailed) -> Verdict | None:
        """The verdict as of now, None where the version was deleted by someone else meanwhile."""
        return next((verdict for verdict in self._verdicts(listing) if verdict.record.id == version), None)

    async def _settle(self, verdict: Verdict, listing: Listing | ListingFailed) -> Reclaimable:
        if verdict.keep:
            return _line(verdict)
        record = verdict.record
        folder = await self._in_thread(lambda root: self._examine(root, record))
        if isinstance(folder, Refused):
            return _refused_line(record, folder)
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return _line(now or verdict)
        if now.record.state is not VersionState.RETIRED:
            self._books.retire(now.record)  # nothing is awaited between the question and this
        await self._books.durable()
        now = self._verdict_of(record.id, listing)
        if now is None or now.keep:
            return _line(now or verdict)
        return await self._discard(replace(verdict, record=now.record), folder)  # the reasons of the plan say more

    async def _discard(self, verdict: Verdict, folder: Identity | Gone) -> Reclaimable:
        record = verdict.record
        if isinstance(folder, Identity):
            outcome = await self._in_thread(lambda root: trash.discard(root, record.path, folder))
            if isinstance(outcome, Refused):
                return _refused_line(record, outcome)
        self._books.deleted(record)
        return _line(verdict)

    async def _survey(self, listing: Listing | ListingFailed) -> list[incoming.Incoming]:
        if (known := _known(listing)) is None:
            return []
        runs = sorted(known.runs | {version.run for version in self._facts.versions()})
        return await self._in_thread(lambda root: incoming.survey(root, runs, self._incoming_ttl))

    async def _settle_incoming(self, found: incoming.Incoming) -> Reclaimable:
        if not found.abandoned:
            return _incoming_line(found)
        outcome = await self._in_thread(lambda root: incoming.discard_abandoned(root, found.path, self._incoming_ttl))
        if isinstance(outcome, Refused):
            return replace(_incoming_line(found), keep=True, reasons=[outcome.reason])
        return _incoming_line(found)

    async def _empty(self, listing: Listing | ListingFailed) -> list[Reclaimable]:
        if _known(listing) is None:
            return []
        stop = threading.Event()
        emptied = await self._in_thread(lambda root: trash.empty(root, stop.is_set), stop)
        return [Reclaimable(path=TRASH_PATH, keep=True, reasons=[sentence]) for sentence in emptied.left]

    async def _in_thread(self, work: Callable[[int], AnswerT], stop: threading.Event | None = None) -> AnswerT:
        """Do file work in a thread that opens the root for itself: a handle shared with it could be closed under it.

        A thread cannot be cancelled. So a cancellation asks it to stop and waits: nothing is deleted after `run` ended.
        """

        def in_root() -> AnswerT:
            with root_at(self._root) as root:
                return work(root)

        task = asyncio.ensure_future(asyncio.to_thread(in_root))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait({task})
            raise


def _known(listing: Listing | ListingFailed) -> Listing | None:
    """A listing to go by: one that failed or is empty deletes nothing."""
    return None if isinstance(listing, ListingFailed) or not listing.found else listing


def _line(verdict: Verdict) -> Reclaimable:
    record = verdict.record
    return Reclaimable(
        path=record.path, keep=verdict.keep, reasons=list(verdict.reasons), version=record.id, bytes=record.bytes
    )


def _refused_line(record: VersionRecord, refused: Refused) -> Reclaimable:
    return Reclaimable(path=record.path, keep=True, reasons=[refused.reason], version=record.id, bytes=record.bytes)


def _incoming_line(found: incoming.Incoming) -> Reclaimable:
    return Reclaimable(path=found.path, keep=not found.abandoned, reasons=[found.reason], bytes=found.bytes)


def _plan(lines: list[Reclaimable], *, done: bool) -> ReclaimPlan:
    freed = sum(line.bytes or 0 for line in lines if not line.keep)
    return ReclaimPlan(items=lines, freed_bytes=freed, done=done)
