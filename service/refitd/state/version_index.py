"""The versions that the store knows: by id, by run, and those that have no verdict yet."""

from collections import Counter
from collections.abc import Collection

from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order


class VersionIndex:
    """`all` holds them by id, `open` those of them without a verdict. Both are changed here alone.

    `deleted_evidence` is the newest version of each run that was REJECTED or LOST and is DELETED: how a run stands does
    not change because files are deleted.
    """

    def __init__(self) -> None:
        """None yet."""
        self.all: dict[str, VersionRecord] = {}
        self.open: dict[str, VersionRecord] = {}
        self.deleted_evidence: dict[str, VersionRecord] = {}
        self._by_run: dict[str, dict[str, VersionRecord]] = {}
        self._in_order: dict[str, list[VersionRecord]] = {}
        self._newest: dict[str, Order] = {}
        self._paths = Counter[str]()

    def keep(self, record: VersionRecord) -> None:
        """Take a version as it is now."""
        if (before := self.all.get(record.id)) is not None:
            self._paths[before.path] -= 1
        self._paths[record.path] += 1
        self._newest[record.run] = max(record.order, self._newest.get(record.run, record.order))
        self.all[record.id] = record
        self._by_run.setdefault(record.run, {})[record.id] = record
        self._in_order.pop(record.run, None)
        if record.state.is_open:
            self.open[record.id] = record
        else:
            self.open.pop(record.id, None)

    def drop(self, record: VersionRecord) -> None:
        """Take a version that is deleted. Harmless where it is not known."""
        newest = self.deleted_evidence.get(record.run, record)
        if record.is_deleted_evidence and record.order >= newest.order:
            self.deleted_evidence[record.run] = record
        if (before := self.all.pop(record.id, None)) is not None:
            self._paths[before.path] -= 1
            self._newest.pop(record.run, None)
        self.open.pop(record.id, None)
        self._in_order.pop(record.run, None)
        mine = self._by_run.get(record.run, {})
        mine.pop(record.id, None)
        if not mine:
            self._by_run.pop(record.run, None)

    def of_run(self, run: str) -> list[VersionRecord]:
        """Those of a run, newest first. They are sorted once after each change, when they are asked for."""
        if run not in self._in_order:
            mine = self._by_run.get(run, {}).values()
            self._in_order[run] = sorted(mine, key=lambda version: version.order, reverse=True)
        return list(self._in_order[run])

    def newest_of(self, run: str) -> Order | None:
        """The newest order of a run's versions; None where it has none."""
        if run not in self._newest and (mine := self.of_run(run)):
            self._newest[run] = mine[0].order
        return self._newest.get(run)

    def is_at(self, path: str) -> bool:
        """Whether a version is known that lies at a path."""
        return self._paths[path] > 0

    @property
    def runs(self) -> Collection[str]:
        """The runs that have any."""
        return self._by_run.keys()
