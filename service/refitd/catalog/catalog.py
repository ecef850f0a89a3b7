"""The catalog: which versions exist, and which are good.

One loop lists the root, at each hint and from time to time: new folders become versions (`Arrivals`), sealed ones that
have changed or gone become LOST (`FileChecks`). Another (`judge.py`) brings each version that is due to its verdict. A
third wakes the versions that wait for a model to be held against.

Every user who can write to the root can make any number of folders. So a scan takes in a few between two turns of the
loop, and no more than `MOST_OPEN` of a run while they have no verdict, the newest first. Runs that no engine follows
share that number, so that their folders hold up no run that engines follow. Announced versions are always taken in.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from refitd.catalog.examining import Examiner, Proofs
from refitd.catalog.files import Files, Unreadable
from refitd.catalog.judge import ANNOUNCE_AGAIN, Judge, Waiting
from refitd.catalog.reading import LateReading
from refitd.catalog.references import References
from refitd.policy.admit import CatalogRules
from refitd.root.scan import FoundFolder, ListingFailed
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.naming import Order, parse_version_id, version_id
from refitd_client.contract.states import VersionState
from refitd_client.validation.conventions import is_foreign

MOST_OPEN = 1000  # versions without a verdict that are taken in of one run, or of all runs that no engine follows
A_TURN = 50  # folders that are taken in before others have their turn on the loop
_CHECKED = frozenset({VersionState.SEALED, VersionState.LOST})


class Arrivals:
    """Makes versions of the folders that a listing has found."""

    def __init__(self, store: Store, rules: CatalogRules, waiting: Waiting) -> None:
        self._store = store
        self._rules = rules
        self._waiting = waiting
        self._logged: set[str] = set()

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

    def _is_new(self, found: FoundFolder) -> bool:
        if is_foreign(found.path):  # whether it was written again is seen where its files are checked
            return not self._store.index.is_at(found.path)
        return version_id(found.run, found.order) not in self._store.versions

    def _take_one(self, found: FoundFolder) -> bool:
        """Return whether the folder has become a version."""
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
        if id_ in self._store.gone:
            if id_ not in self._logged:
                self._logged.add(id_)
                text = f"{found.path} is there, and {id_} was deleted: it is taken for no version, and stays; a trainer"
                self._store.say("version", id_, f"{text} that publishes the step again begins a new generation")
            return False
        self._announce(found.run, order, found.path, "found in the root")
        return True

    def rewritten(self, version: VersionRecord, found: str) -> None:
        """Announce the new contents of a folder that a restarted trainer of another format has written again.

        Args:
            version: the LOST version whose folder it was.
            found: the signature of the folder's files now.
        """
        newer = [v for v in self._store.versions_of(version.run) if v.path == version.path and v.order > version.order]
        if newer or found == version.signature:
            return
        order = self._next_order(version.run, version.order.step)
        text = f"{version.path} was written again: generation {order.generation}"
        self._announce(version.run, order, version.path, text)

    def _announce(self, run: str, order: Order, path: str, text: str) -> None:
        record = VersionRecord(
            run=run,
            order=order,
            path=path,
            state=VersionState.ANNOUNCED,
            created_at=self._store.clock.now(),
            kind=self._rules.kind,
        )
        self._store.put_version(record, text)
        self._waiting.changed.notify()

    def _newest(self, run: str) -> Order:
        """Return the newest order that a run ever had, also where all of it was deleted."""
        if (known := self._store.index.newest_of(run)) is not None:
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


class FileChecks:
    """Compares the files of known versions with what they were: SEALED versions become LOST, and are found again."""

    def __init__(self, store: Store, files: Files, waiting: Waiting, judge: Judge, arrivals: Arrivals) -> None:
        self._store = store
        self._files = files
        self._waiting = waiting
        self._judge = judge
        self._arrivals = arrivals
        self._rejected_as: dict[str, str] = {}  # signatures of rejected folders when they were first checked again
        self._checks: dict[str, asyncio.Task[dict[str, str | Unreadable | None]]] = {}

    async def check(self, record: VersionRecord) -> bool:
        """Return whether a version's files are still those that were sealed; mark it LOST where they are not.

        Engines that ask at the same time share one look: a fleet's updates then also share one write of the journal.
        """
        check = self._checks.get(record.path)
        if check is None:
            check = self._checks[record.path] = asyncio.create_task(self._files.signatures([record.path]))
            check.add_done_callback(lambda _: self._checks.pop(record.path))
        found = (await asyncio.shield(check))[record.path]  # one engine that is cancelled stops no other's check
        if found != record.signature and not isinstance(found, Unreadable):
            self._lose(record, gone=found is None)
        return found == record.signature

    async def check_all(self) -> None:
        """Check sealed and lost versions, those without a verdict, and rejected folders that may have been mended."""
        versions = [
            each
            for each in self._store.versions.values()
            if each.state in _CHECKED
            or each.state.is_open
            # A rejected folder of a trainer's own format: no notice says that it was mended.
            or (each.state is VersionState.REJECTED and is_foreign(each.path) and not each.noticed)
        ]
        signatures = await self._files.signatures([version.path for version in versions])
        for version in versions:
            if self._store.versions.get(version.id) is version and version.id not in self._waiting.judging:
                self._compare(version, signatures[version.path])
            # Else something happened to it meanwhile: the next scan checks it.

    def _compare(self, version: VersionRecord, found: str | Unreadable | None) -> None:
        match version.state:
            case VersionState.SEALED:
                if found != version.signature and not isinstance(found, Unreadable):
                    self._lose(version, gone=found is None)
            case VersionState.LOST:
                if found == version.signature:  # a folder was moved away and back again
                    sealed = replace(version, state=VersionState.SEALED, reason=None)
                    self._store.put_version(sealed, f"sealed: {version.path} is back, unchanged")
                if isinstance(found, str) and is_foreign(version.path) and not version.noticed:
                    self._arrivals.rewritten(version, found)
            case VersionState.REJECTED:
                if isinstance(found, str) and self._rejected_as.setdefault(version.id, found) != found:
                    del self._rejected_as[version.id]
                    text = f"looked at again: {version.path} has changed since it was rejected"
                    again = replace(version, state=VersionState.ANNOUNCED, reason=None, code=None)
                    self._store.put_version(again, text)
                    self._waiting.changed.notify()
            case _:
                if found is None and not version.handed:
                    self._judge.reject(version.id, f"{version.path} was taken away before it could be checked")

    def _lose(self, record: VersionRecord, *, gone: bool) -> None:
        reason = f"{record.path} {'is gone' if gone else 'has changed'} since it was checked: publish the step again"
        current = self._store.versions.get(record.id)
        if current is not None and current.state is VersionState.SEALED:
            self._store.put_version(replace(current, state=VersionState.LOST, reason=reason), f"lost: {reason}")


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
        files: Files,
        references: References,
        rules: CatalogRules,
        proofs: Proofs | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            store: what the service knows.
            files: the files under the root.
            references: the models that versions are held against.
            rules: what versions may do.
            proofs: what engines' GPUs have found; without it the service reads everything.
        """
        self._store = store
        self._files = files
        self._rules = rules
        self._waiting = waiting = Waiting(store)
        self._judge = Judge(store, files, references, rules, waiting, Examiner(files, proofs, rules.prove))
        self._arrivals = Arrivals(store, rules, waiting)
        self._checks = FileChecks(store, files, waiting, self._judge, self._arrivals)
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
            group.create_task(self._wake_when_models_come(), name="models")

    def _reconsider(self) -> None:
        """Look at verdicts that a new start may change.

        This start may have been given a model, for want of which versions were REJECTED. A version that was being
        validated when the service died is validated once more; after the third death it is set aside.
        """
        for version in list(self._store.versions.values()):
            if version.unended >= MOST_DEATHS:
                text = f"set aside: the service died {version.unended} times while it validated this version. See in "
                why = "the log of the service, or of its container, why it died (often for want of memory), then "
                self._judge.reject(version.id, f"{text}{why}{ANNOUNCE_AGAIN}", Code.SET_ASIDE)
            elif version.unended:
                text = "the service died while it validated this version: it is validated again, by itself"
                self._store.say("version", version.id, text)
            elif version.state is VersionState.REJECTED and version.code is Code.NO_REFERENCE:
                again = replace(version, state=VersionState.ANNOUNCED, reason=None, code=None)
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
                self._store.faults.set_root(listing.reason)
            else:
                self._store.faults.set_root(None)
                await self._arrivals.take_in(listing.found)
                self._waiting.wake_handed()
                now = self._store.clock.monotonic()
                if now - checked_at >= self._rules.scan_interval:  # a hint says that something came, not went
                    await self._checks.check_all()
                    checked_at = now
            await asyncio.sleep(PACE_SECONDS)
            await self._waiting.hints.wait_after(seen, within=self._rules.scan_interval)
