"""The catalog: which versions exist, and which are good.

One loop lists the root, at each hint and from time to time: new folders become versions (`Arrivals`), and known ones
are looked at (`checks.py`), which has a loop of its own to read those again that have changed. Another (`judge.py`)
brings each version that is due to its verdict. A fourth wakes the versions that wait for a model to be held against.

Every user who can write to the root can make any number of folders. So a scan takes in a few between two turns of the
loop, and no more than `MOST_OPEN` of a run while they have no verdict, the newest first. Runs that no engine follows
share that number, so that their folders hold up no run that engines follow. Announced versions are always taken in.

Hints say that something in the root has changed (`Watch`). A hint carries no message: the scan finds out what it was.
watchdog loses events in bursts and its handler hears of no overflow; NFS and Lustre give none at all. So an event means
"look again" and nothing else, and the catalog scans from time to time whether one came or not.
"""

import asyncio
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify_move_event_grouper import InotifyMoveEventGrouper
from watchdog.observers.polling import PollingObserver

from refitd.catalog.checks import FileChecks
from refitd.catalog.examining import Examiner, LateReading, References
from refitd.catalog.files import DiskFiles
from refitd.catalog.judge import ANNOUNCE_AGAIN, Judge, Waiting
from refitd.policy.admit import CatalogRules, Prove
from refitd.root.ownership import root_file_system, wants_polling
from refitd.root.scan import FoundFolder, ListingFailed
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.proving import RankProofs
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, Order, parse_version_id, version_id
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import is_foreign

MOST_OPEN = 1000  # versions without a verdict that are taken in of one run, or of all runs that no engine follows
A_TURN = 50  # folders that are taken in before others have their turn on the loop


class Arrivals:
    """Makes versions of the folders that a listing has found."""

    def __init__(self, store: Store, rules: CatalogRules, waiting: Waiting) -> None:
        self._store = store
        self._rules = rules
        self._waiting = waiting
        self._logged: set[str] = set()
        self._listed: Mapping[str, Order] = {}
        self._note_listed()

    async def take_in(self, found: Sequence[FoundFolder]) -> None:
        """Make versions of the folders that are new, as many as may wait for a verdict."""
        followed = {engine.run for engine in self._store.engines.values()}
        open_ = Counter(version.run if version.run in followed else None for version in self._store.open.values())
        left_out = Counter[str]()
        for number, each in enumerate(newest_first(each for each in found if self._is_new(each)), 1):
            share = each.run if each.run in followed else None
            if open_[share] >= MOST_OPEN:
                left_out[each.run] += 1
            elif self._take_one(each):
                open_[share] += 1
            if number % A_TURN == 0:
                await asyncio.sleep(0)
        self._report_left_out(left_out)
        self._note_listed()

    def _note_listed(self) -> None:
        """Remember the newest version of each run, which what is listed from now on is held against: of folders that
        one listing shows together, none appeared after the other.
        """
        runs = {run: self._store.index.newest_of(run) for run in self._store.index.runs}
        self._listed = {run: newest for run, newest in runs.items() if newest is not None}

    def _after(self, run: str, order: Order) -> str | None:
        """The run's newest version if it was listed before this one appeared and is of a later step; else None."""
        newest = self._listed.get(run)
        if newest is None or run in self._store.faults.runs_left_out or newest.generation != order.generation:
            return None
        return version_id(run, newest) if order < newest else None

    def _is_new(self, found: FoundFolder) -> bool:
        if is_foreign(found.path):  # whether it was written again is seen where its files are checked
            return not self._store.index.is_at(found.path)
        return version_id(found.run, found.order) not in self._store.versions

    def _take_one(self, found: FoundFolder) -> bool:
        order = found.order
        if is_foreign(found.path):
            if self._store.index.is_at(found.path):
                return False
            order = Order(self._newest(found.run).generation, found.order.step)
            if version_id(found.run, order) in self._store.gone:
                order = self._next_order(found.run, found.order.step)
        id_ = version_id(found.run, order)
        if id_ in self._store.versions:
            return False
        if id_ in self._store.gone or self._store.runs.was_deleted(found.run, order):
            if id_ not in self._logged:
                self._logged.add(id_)
                text = f"{found.path} is there, and {id_} was deleted: it is taken for no version, and stays; a trainer"
                self._store.say("version", id_, f"{text} that publishes the step again begins a new generation")
            return False
        self._announce(found.run, order, found.path, "found in the root")
        return True

    def rewritten(self, version: VersionRecord) -> None:
        """Announce the new contents of the LOST version's folder, which a restarted trainer has written again."""
        order = self._next_order(version.run, version.order.step)
        text = f"{version.path} was written again: generation {order.generation}"
        self._announce(version.run, order, version.path, text)

    def _announce(self, run: str, order: Order, path: str, text: str) -> None:
        after = self._after(run, order)
        record = VersionRecord(
            run=run,
            order=order,
            path=path,
            state=VersionState.ANNOUNCED,
            created_at=self._store.clock.now(),
            kind=self._rules.kind,
        ).having(after=after)
        self._store.put_version(record, text if after is None else f"{text}, after {after}, which stays the newest")
        self._waiting.changed.notify()

    def _newest(self, run: str) -> Order:
        """Return the newest order that a run ever had, also where all of it was deleted."""
        known = self._store.index.newest_of(run)
        if (begins := self._store.runs.begins(run, known)) is not None:
            return Order(begins, -1)
        if known is not None:
            return known
        gone = [named[1] for id_ in self._store.gone if (named := parse_version_id(id_)) and named[0] == run]
        return max(gone, default=Order(1, -1))

    def _next_order(self, run: str, step: int) -> Order:
        """Return the order of a step with new contents: a trainer that goes back begins a new generation."""
        newest = self._newest(run)
        return Order(newest.generation + 1 if step <= newest.step else newest.generation, step)

    def _report_left_out(self, runs: Counter[str]) -> None:
        """Set the fault while folders are left out; log when that begins and when it is over."""
        before, fault = self._store.faults.folders, None
        if runs:
            some = ", ".join(f"{number} of run {run}" for run, number in runs.most_common(3))
            count = "1 folder is" if runs.total() == 1 else f"{runs.total()} folders are"
            fault = (
                f"{count} not taken in yet ({some}): {MOST_OPEN} versions wait for a verdict already, and the others "
                "follow as these have theirs. Remove folders that are no versions, and close runs that have ended "
                "('refitd runs close RUN'); a version that is announced is taken in at once"
            )
        self._store.faults.leave_out(runs, fault)
        if fault is not None and before is None:
            self._store.say("root", "root", fault, is_fault=True)
        elif fault is None and before is not None:
            self._store.say("root", "root", "all folders of the root are taken in again")


def newest_first(found: Iterable[FoundFolder]) -> list[FoundFolder]:
    """Order folders: the newest of each run, then the second of each, so that a run with many holds up no other."""
    by_run = sorted(found, key=lambda each: (each.run, -each.order.generation, -each.order.step))
    placed = [
        (place, each) for _, mine in groupby(by_run, key=lambda each: each.run) for place, each in enumerate(mine)
    ]
    return [each for _, each in sorted(placed, key=lambda pair: pair[0])]


PACE_SECONDS = 0.02  # between two scans: a burst of hints is one hint
MOST_DEATHS = 3  # of the service, while it validated a version: two in a row are also a node that is restarted twice


class Catalog:
    """Brings versions from their first sight to a verdict.

    `check` says whether a sealed version is still what it was, and `read` reads one that GPUs have proved. `judging`
    has the ids of those being validated. `nudge` has the root scanned again, soon.
    """

    def __init__(
        self,
        store: Store,
        files: DiskFiles,
        references: References,
        rules: CatalogRules,
        proofs: RankProofs | None = None,
    ) -> None:
        self._store = store
        self._files = files
        self._rules = rules
        self._waiting = waiting = Waiting(store)
        proofs = None if rules.prove is Prove.SERVICE else proofs
        self._judge = Judge(store, files, references, rules, waiting, Examiner(files, proofs))
        self._arrivals = Arrivals(store, rules, waiting)
        self._checks = FileChecks(store, files, rules, waiting, self._judge, self._arrivals.rewritten)
        self.check = self._checks.check
        self.read = LateReading(store, files, references, self._judge.options).read
        self.judging = waiting.judging
        self.nudge = waiting.nudge

    async def run(self) -> None:
        """Scan and judge until cancelled."""
        self._reconsider()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scan_forever(), name="scan")
            group.create_task(self._judge.run(group), name="judge")
            group.create_task(self._checks.run(), name="read again")
            group.create_task(self._wake_when_models_come(), name="models")

    def _reconsider(self) -> None:
        """Look at verdicts that a new start may change.

        This start may have been given a model, for want of which versions were REJECTED. A version that was being
        validated when the service died is validated once more; after the third death it is set aside.
        """
        for version in list(self._store.versions.values()):
            if version.verdict.unended >= MOST_DEATHS:
                times = version.verdict.unended
                text = f"set aside: the service died {times} times while it validated this version. See in "
                why = "the log of the service, or of its container, why it died (often for want of memory), then "
                self._judge.reject(version.id, f"{text}{why}{ANNOUNCE_AGAIN}", Code.SET_ASIDE)
            elif version.verdict.unended:
                text = "the service died while it validated this version: it is validated again, by itself"
                self._store.say("version", version.id, text)
            elif version.state is VersionState.REJECTED and version.verdict.code is Code.NO_REFERENCE:
                again = version.having(state=VersionState.ANNOUNCED, reason=None, code=None)
                self._store.put_version(again, "looked at again: there may be a model to hold it against now")

    async def _wake_when_models_come(self) -> None:
        """Judge versions that waited for an engine's model together, when it comes.

        Were each judged when its next try is due, an old one could be the first, and engines would go back to it.
        """
        seen = self._store.models_changed.count
        while True:
            seen = await self._store.models_changed.wait_after(seen)
            self._waiting.wake_unknown()

    async def _scan_forever(self) -> None:
        checked_at = -math.inf
        while True:
            seen = self._waiting.hints.count
            listing = await self._files.scan()
            if isinstance(listing, ListingFailed):
                self._store.faults.set(root=listing.reason)
            else:
                self._store.faults.set(root=None)
                await self._arrivals.take_in(listing.found)
                self._waiting.wake_handed()
                now = self._store.clock.monotonic()
                if now - checked_at >= self._rules.scan_interval:  # a hint says that something came, not went
                    await self._checks.check_all()
                    checked_at = now
            await asyncio.sleep(PACE_SECONDS)
            await self._waiting.hints.wait_after(seen, within=self._rules.scan_interval)


POLL_SECONDS = 0.5
PAIRING_SECONDS = 0.01

# watchdog holds all events back behind half a rename, such as one into the trash, for half a second, in case the other
# half comes. Here a rename is a hint like any other, whole or half.
InotifyMoveEventGrouper.delay = PAIRING_SECONDS

log = structlog.get_logger("refitd")


# A file counts when it is closed. Deletions are left to the scan and to the check before each load: the collector
# deletes hundreds of files, and each event costs the interpreter's lock a turn while an update waits for it.
_EVENTS: list[type[FileSystemEvent]] = [DirCreatedEvent, DirMovedEvent, FileMovedEvent, FileClosedEvent]


class _Hints(FileSystemEventHandler):
    """Calls `nudge` on the loop for events that may be a version coming; reads and writes inside files are noise."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._own = str(root / SERVICE_FOLDER)
        self._loop = loop
        self._nudge = nudge

    def on_any_event(self, event: FileSystemEvent) -> None:
        if str(event.src_path).startswith(self._own):
            return
        if event.event_type != "moved" and f"/{INCOMING_PREFIX}" in str(event.src_path):
            return  # a version that is being written: it arrives by a rename
        with suppress(RuntimeError):  # the loop closed while the observer's thread was still delivering
            self._loop.call_soon_threadsafe(self._nudge)


class Watcher:
    """An observer thread for the root."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._root = root
        self._handler = _Hints(root, loop, nudge)
        self._observer: BaseObserver | None = None

    async def run(self) -> None:
        await asyncio.to_thread(self._start)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.to_thread(self._stop))

    def _start(self) -> None:
        """Start watching; poll where events are refused (too many watches)."""
        # A directory that is renamed is watched already, and watchdog says so at each version: several lines each time.
        warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)
        try:
            self._observer = self._observe(polling=wants_polling(root_file_system(self._root)))
        except OSError as error:
            log.warning("file events are refused: polling instead", error=str(error))
            self._observer = self._observe(polling=True)

    def _observe(self, *, polling: bool) -> BaseObserver:
        observer: BaseObserver = PollingObserver(timeout=POLL_SECONDS) if polling else Observer()
        observer.schedule(self._handler, str(self._root), recursive=True, event_filter=_EVENTS)
        observer.start()
        return observer

    def _stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(timeout=5)
