"""Folders of the root against the versions that are known: new folders become versions, changed ones lose theirs.

Anybody who can write to the root can make any number of folders. So a scan takes in a few between two turns of the
loop, and no more than `MOST_OPEN` of a run while they have no verdict, the newest first. Runs that no engine follows
share that number, so that their folders hold up no run that engines follow. Announced versions are always taken in.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from refitd.catalog.files import Files, Unreadable
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.policy.settle import CatalogRules
from refitd.root.scan import FoundFolder
from refitd.state.store import Store
from refitd.state.version import VersionRecord
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
            self._store.say("root", "root", fault)
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

    def __init__(self, store: Store, files: Files, waiting: Waiting, verdicts: Verdicts, arrivals: Arrivals) -> None:
        self._store = store
        self._files = files
        self._waiting = waiting
        self._verdicts = verdicts
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
                    self._verdicts.reject(version.id, f"{version.path} was taken away before it could be checked")

    def _lose(self, record: VersionRecord, *, gone: bool) -> None:
        reason = f"{record.path} {'is gone' if gone else 'has changed'} since it was checked: publish the step again"
        current = self._store.versions.get(record.id)
        if current is not None and current.state is VersionState.SEALED:
            self._store.put_version(replace(current, state=VersionState.LOST, reason=reason), f"lost: {reason}")
