"""Folders that a listing has found become versions: which one each is, and whether it is known already."""

from refitd.catalog.conventions import is_foreign
from refitd.catalog.record import VersionRecord
from refitd.catalog.rules import CatalogRules
from refitd.catalog.scan import Found
from refitd.catalog.waiting import Waiting
from refitd.ledger import Ledger
from refitd_client.contract.naming import Order, parse_version_id, version_id
from refitd_client.contract.states import VersionState


class Arrivals:
    """Takes in what is found."""

    def __init__(self, ledger: Ledger, rules: CatalogRules, waiting: Waiting) -> None:
        self._ledger = ledger
        self._rules = rules
        self._waiting = waiting
        self._told: set[str] = set()

    def meet(self, found: Found) -> None:
        """A folder that looks like a version."""
        order = self._placed(found) if is_foreign(found.path) else found.order
        if order is None:
            return
        id_ = version_id(found.run, order)
        if id_ in self._ledger.versions:
            return
        if id_ in self._ledger.gone:
            self._tell_once(
                id_, f"{found.path} is back after it was deleted: a restarted trainer begins a new generation"
            )
            return
        self._announce(found.run, order, found.path, "found in the root")

    def rewritten(self, version: VersionRecord, found: str) -> None:
        """A trainer that was restarted has written into the folder of an earlier version of its own.

        `found` is what the folder looks like now, `version` the one that was lost by that.
        """
        newer = [v for v in self._ledger.versions.values() if v.path == version.path and v.order > version.order]
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
            created_at=self._ledger.clock.now(),
            kind=self._rules.kind,
        )
        self._ledger.put_version(record, text)
        self._waiting.bell.ring()

    def _placed(self, found: Found) -> Order | None:
        """Where a trainer's own folder belongs in its run; None where the version in it is known already."""
        known = [version for version in self._ledger.versions.values() if version.path == found.path]
        if known:
            return None  # whether it was written again is seen where its files are looked at
        order = Order(self._newest(found.run).generation, found.order.step)
        is_back = version_id(found.run, order) in self._ledger.gone
        return self._written_again(found.run, order.step) if is_back else order

    def _newest(self, run: str) -> Order:
        """The newest that was ever there in a run, also when all of it was deleted."""
        if known := self._ledger.versions_of(run):
            return known[0].order
        gone = [named[1] for id_ in self._ledger.gone if (named := parse_version_id(id_)) and named[0] == run]
        return max(gone, default=Order(1, -1))

    def _written_again(self, run: str, step: int) -> Order:
        """The order of a step whose folder has new contents: a trainer that goes back begins a new generation."""
        newest = self._newest(run)
        return Order(newest.generation + 1 if step <= newest.step else newest.generation, step)

    def _tell_once(self, id_: str, text: str) -> None:
        if id_ not in self._told:
            self._told.add(id_)
            self._ledger.say("version", id_, text)
