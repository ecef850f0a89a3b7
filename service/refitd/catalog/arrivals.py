"""Folders that a listing has found become versions: which one each is, and whether it is known already.

Whoever can write to the root can make any number of folders. So a few are taken in at each turn of the loop, and of a
run so many as long as they have no verdict, the newest first. Runs that no engine follows share one such number, so
that their folders hold up nothing of a run that engines follow. What is announced is taken in whatever there is.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from refitd.catalog.waiting import Waiting
from refitd.policy.rules import CatalogRules
from refitd.root.scan import Found
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id, version_id
from refitd_client.contract.states import VersionState
from refitd_client.validation.conventions import is_foreign

MOST_OPEN = 1000  # versions without a verdict that are taken in of one run, or of all runs that no engine follows
A_TURN = 50  # folders that are taken in before others have their turn on the loop


class Arrivals:
    """Takes in what is found."""

    def __init__(self, store: Store, rules: CatalogRules, waiting: Waiting) -> None:
        self._store = store
        self._rules = rules
        self._waiting = waiting
        self._told: set[str] = set()

    async def meet_all(self, found: Sequence[Found]) -> None:
        """Folders that look like versions: all that a listing has found."""
        followed = {engine.run for engine in self._store.engines.values()}
        open_ = Counter(version.run if version.run in followed else None for version in self._store.open.values())
        left_out = Counter[str]()
        for number, each in enumerate(newest_first(each for each in found if self._is_new(each)), 1):
            share = each.run if each.run in followed else None
            if open_[share] >= MOST_OPEN:
                left_out[each.run] += 1
            elif self._meet(each):
                open_[share] += 1
            if number % A_TURN == 0:
                await asyncio.sleep(0)
        self._leave_out(left_out)

    def _is_new(self, found: Found) -> bool:
        if is_foreign(found.path):
            return not self._store.index.is_at(found.path)
        return version_id(found.run, found.order) not in self._store.versions

    def _leave_out(self, runs: Counter[str]) -> None:
        """Say what is left out while it is, and in the log when that begins and when it is over."""
        before = self._store.faults.folders
        fault = _left_out(runs) if runs else None
        self._store.faults.leave_out(runs, fault)
        if fault is not None and before is None:
            self._store.say("root", "root", fault)
        elif fault is None and before is not None:
            self._store.say("root", "root", "all folders of the root are taken in again")

    def _meet(self, found: Found) -> bool:
        """A folder that looks like a version; whether it has become one."""
        order = self._placed(found) if is_foreign(found.path) else found.order
        id_ = None if order is None else version_id(found.run, order)
        if order is None or id_ is None or id_ in self._store.versions:
            return False
        if id_ in self._store.gone:
            self._tell_once(
                id_,
                f"{found.path} is there, and {id_} was deleted: it is taken for no version, and stays; a trainer that "
                "publishes the step again begins a new generation",
            )
            return False
        self._announce(found.run, order, found.path, "found in the root")
        return True

    def rewritten(self, version: VersionRecord, found: str) -> None:
        """A trainer that was restarted has written into the folder of an earlier version of its own.

        `found` is what the folder looks like now, `version` the one that was lost by that.
        """
        newer = [v for v in self._store.versions_of(version.run) if v.path == version.path and v.order > version.order]
        if newer or found == version.signature:
            return
        order = self._written_again(version.run, version.order.step)
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

    def _placed(self, found: Found) -> Order | None:
        """Where a trainer's own folder belongs in its run; None where the version in it is known already."""
        if self._store.index.is_at(found.path):
            return None  # whether it was written again is seen where its files are looked at
        order = Order(self._newest(found.run).generation, found.order.step)
        is_back = version_id(found.run, order) in self._store.gone
        return self._written_again(found.run, order.step) if is_back else order

    def _newest(self, run: str) -> Order:
        """The newest that was ever there in a run, also when all of it was deleted."""
        if (known := self._store.index.newest_of(run)) is not None:
            return known
        gone = [named[1] for id_ in self._store.gone if (named := parse_version_id(id_)) and named[0] == run]
        return max(gone, default=Order(1, -1))

    def _written_again(self, run: str, step: int) -> Order:
        """The order of a step whose folder has new contents: a trainer that goes back begins a new generation."""
        newest = self._newest(run)
        return Order(newest.generation + 1 if step <= newest.step else newest.generation, step)

    def _tell_once(self, id_: str, text: str) -> None:
        if id_ not in self._told:
            self._told.add(id_)
            self._store.say("version", id_, text)


def _left_out(runs: Counter[str]) -> str:
    some = ", ".join(f"{number} of run {run}" for run, number in runs.most_common(3))
    count = "1 folder is" if runs.total() == 1 else f"{runs.total()} folders are"
    return (
        f"{count} not taken in yet ({some}): {MOST_OPEN} versions wait for a verdict already, and "
        "the others follow as these have theirs. Remove folders that are no versions, and close runs that have ended "
        "('refitd runs close RUN'); a version that is announced is taken in at once"
    )


def newest_first(found: Iterable[Found]) -> list[Found]:
    """The newest of each run, then the second of each, and so on: one that has many does not come before the others."""
    by_run = sorted(found, key=lambda each: (each.run, -each.order.generation, -each.order.step))
    placed = [
        (place, each) for _, mine in groupby(by_run, key=lambda each: each.run) for place, each in enumerate(mine)
    ]
    return [each for _, each in sorted(placed, key=lambda pair: pair[0])]
