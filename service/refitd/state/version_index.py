"""What the store keeps beside records: which versions there are, their order in lists, and which runs have ended. Pure.

"Newest first" means two things: across runs by the time of the first sight, within one run by generation and step. They
disagree where a run's earlier step is seen after a later one. So each version has a place, a number:

    the number of its first sight, counted up over all runs,
    or the place of the next version of its run, where that is smaller: a late step joins the step that it precedes.

Lists go by (place, generation, step), the greatest first. That is a total order, since only versions of one run share a
place. It is the order of (generation, step) within each run. A place never changes: a version that comes later is never
the reason for one that is smaller. So a cursor, which is such a key, neither skips nor repeats what was there before.

A run that has ended is closed, by an operator or by the trainer. It is not in trouble because no engine follows it;
engines that still follow it are free for a new run; of its versions collection keeps the newest good one, and a newer
one without a verdict. The next version that comes opens it again."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from refitd.engine.fingerprints import means_of
from refitd.state.faults import UpstreamWord
from refitd.state.records import EngineRecord, RunRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order


class EngineIndex(dict[str, EngineRecord]):
    """The engines by id. They are put by `engines[id] = record`, and removed by `pop`."""

    def __init__(self) -> None:
        super().__init__()
        self._of_run: dict[str | None, dict[str, EngineRecord]] = {}
        self._at: dict[str, dict[str, None]] = {}  # ids in the order in which they came there
        self._served: Counter[tuple[str | None, str]] = Counter()  # by run and version, of those with known contents
        self._plugged: Counter[str | None] = Counter()
        self._proved: dict[tuple[str | None, str | None, str | None], dict[str, None]] = {}  # ids
        self._contradicted: Counter[str] = Counter()  # by version
        self._gave: dict[tuple[str, str | None, tuple[str, ...]], dict[str, str]] = {}  # fingerprints by id

    def __setitem__(self, name: str, record: EngineRecord) -> None:
        before = self.get(name)
        super().__setitem__(name, record)
        self._count(before, -1)
        self._count(record, 1)
        if before is None or before.run == record.run:
            self._of_run.setdefault(record.run, {})[name] = record
        else:  # engines of a run stay in the order of all engines, by which ties are broken
            del self._of_run[before.run][name]
            self._of_run[record.run] = {each.id: each for each in self.values() if each.run == record.run}
        if before is not None and before.address is not None and before.address != record.address:
            self._at[before.address].pop(name, None)
        if record.address is not None:
            self._at.setdefault(record.address, {})[name] = None

    def pop(self, name: str, default: EngineRecord | None = None) -> EngineRecord | None:  # type: ignore[override]
        """Remove an engine; return it, or the default where there is none."""
        record = super().pop(name, None)
        if record is None:
            return default
        self._count(record, -1)
        self._of_run[record.run].pop(name, None)
        if record.address is not None:
            self._at[record.address].pop(name, None)
        return record

    def _count(self, record: EngineRecord | None, by: int) -> None:
        if record is None:
            return
        self._plugged[record.run] += by * (record.seen.plugin is not None)
        proved = record.serving, record.seen.configuration, record.contents.proof
        if by > 0:
            self._proved.setdefault(proved, {})[record.id] = None
        else:
            del self._proved[proved][record.id]
            if not self._proved[proved]:
                del self._proved[proved]
        if record.doubted is not None and record.serving is not None:
            self._contradicted[record.serving] += by
        for version, found in record.contents.given.items():
            given = self._gave.setdefault((version, record.seen.configuration, means_of(found)), {})
            if by > 0:
                given[record.id] = found
            else:
                given.pop(record.id, None)
            if not given:
                del self._gave[version, record.seen.configuration, means_of(found)]
        if record.known and record.serving is not None:
            served = record.run, record.serving
            self._served[served] += by
            if not self._served[served]:
                del self._served[served]  # a run serves a new version at each step

    def of_run(self, run: str | None) -> list[EngineRecord]:
        """The engines that follow a run, in the order of all; with None those that follow none."""
        return list(self._of_run.get(run, {}).values())

    def at(self, address: str | None) -> Iterable[EngineRecord]:
        """The engines whose server was last reached at an address; none for None."""
        return (self[name] for name in self._at.get(address or "", ()))

    def serving(self, run: str | None, version: str | None) -> int:
        """How many engines of a run have known contents and serve a version."""
        return self._served[run, version or ""]

    def proved(self, serving: str | None, configuration: str | None, proof: str | None) -> list[EngineRecord]:
        """The engines of a configuration that serve a version, where this is what proves it."""
        return [self[name] for name in self._proved.get((serving, configuration, proof), ())]

    def given(self, version: str, configuration: str | None, like: str) -> Mapping[str, str]:
        """What engines of a configuration gave for a version, by their ids, as far as it is comparable with `like`."""
        return self._gave.get((version, configuration, means_of(like)), {})

    def contradicted(self, version: str) -> bool:
        """Whether engines contradict each other about a version, as far as they were told to."""
        return self._contradicted[version] > 0

    def plugged(self, run: str | None) -> int:
        """How many engines of a run have refitd's plugin."""
        return self._plugged[run]


class VersionIndex:
    """`all` holds them by id, `open` those of them without a verdict. Both are changed here alone.

    `deleted_evidence` is the newest version of each run that was REJECTED or LOST and is DELETED: how a run stands does
    not change because files are deleted. `deleted_lost` has, by id, all that were LOST and are DELETED: an object store
    may still have them. It has versions with a manifest alone: no others are pushed, and they may be thousands.
    `deleted_newest` is, by run, the newest that was good or barred and is DELETED.
    """

    def __init__(self) -> None:
        self.all: dict[str, VersionRecord] = {}
        self.open: dict[str, VersionRecord] = {}
        self.deleted_evidence: dict[str, VersionRecord] = {}
        self.deleted_lost: dict[str, VersionRecord] = {}
        self.deleted_newest: dict[str, Order] = {}
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
        self.deleted_lost.pop(record.id, None)  # a follower has pulled it again
        if record.state.is_open:
            self.open[record.id] = record
        else:
            self.open.pop(record.id, None)

    def drop(self, record: VersionRecord) -> None:
        """Take a version that is deleted. Harmless where it is not known."""
        newest = self.deleted_evidence.get(record.run, record)
        if record.is_deleted_evidence and record.order >= newest.order:
            self.deleted_evidence[record.run] = record
        if record.is_lost and record.files.owned:
            self.deleted_lost[record.id] = record
        if record.was_good or record.barred:
            self.deleted_newest[record.run] = max(record.order, self.deleted_newest.get(record.run, record.order))
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

    def lost_too_of(self, run: str) -> list[VersionRecord]:
        """Those of a run, and those of `deleted_lost`, newest first."""
        lost = [record for record in self.deleted_lost.values() if record.run == run]
        return sorted([*self.of_run(run), *lost], key=lambda version: version.order, reverse=True)

    def deleted(self, record: VersionRecord) -> VersionRecord | None:
        """What is known of a version that is deleted; None where nothing is kept of it."""
        evidence = self.deleted_evidence.get(record.run)
        return evidence if evidence is not None and evidence.id == record.id else self.deleted_lost.get(record.id)

    def newest_of(self, run: str) -> Order | None:
        """The newest order of a run's versions; None where it has none."""
        if run not in self._newest and (mine := self.of_run(run)):
            self._newest[run] = mine[0].order
        return self._newest.get(run)

    def newest_known(self, run: str) -> Order | None:
        """The newest of a run that ever was good or barred; None where it has none."""
        here = (version.order for version in self.of_run(run) if version.was_good or version.barred)
        found = (next(here, None), self.deleted_newest.get(run))
        return max((order for order in found if order is not None), default=None)

    def is_at(self, path: str) -> bool:
        """Whether a version is known that lies at a path."""
        return self._paths[path] > 0

    @property
    def runs(self) -> Collection[str]:
        return self._by_run.keys()


Row = tuple[int, int, int]  # generation, step, place


class ListOrder:
    """The places of all versions that were ever seen, deleted ones among them."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {}  # of each run, in the order of generation and step
        self._last = 0

    def remember(self, run: str, row: Row) -> None:
        """Take a version whose place is known already."""
        insort(self._rows.setdefault(run, []), row)
        self._last = max(self._last, row[2])

    def has(self, run: str) -> bool:
        """Whether a run ever had a version."""
        return bool(self._rows.get(run))

    def newest(self, run: str) -> Order | None:
        """The newest version that a run ever had."""
        rows = self._rows.get(run)
        return Order(*rows[-1][:2]) if rows else None

    def of(self, run: str, order: Order) -> int:
        """The place of a version. One that was not seen before gets its own now."""
        rows, key = self._rows.setdefault(run, []), (order.generation, order.step)
        at = bisect_left(rows, (*key, 0))
        if at < len(rows) and rows[at][:2] == key:
            return rows[at][2]
        if at < len(rows):
            place = rows[at][2]
        else:
            self._last = place = self._last + 1
        rows.insert(at, (*key, place))
        return place


class Runs:
    """`closed` has when each closed run was closed (RFC 3339), `followed_since` since when engines follow a run
    (monotonic seconds). A run that is in neither is open, and no engine follows it. `desired` and `ordered` have the
    ids of `RunRecord`, by run, where there are any, `deleted` up to where runs were deleted, and `left` what hosts had.
    `upstream` is what is known of the upstream that this host follows, None where it follows none, or has not looked
    yet.
    """

    def __init__(self) -> None:
        self.closed: dict[str, str] = {}
        self.desired: dict[str, str] = {}
        self.ordered: dict[str, str] = {}
        self.deleted: dict[str, Order] = {}
        self.left: dict[str, dict[str, tuple[str, int]]] = {}
        self.followed_since: dict[str, float] = {}
        self.upstream: UpstreamWord | None = None

    def set_upstream(self, word: UpstreamWord) -> None:
        """The upstream was looked at."""
        self.upstream = word

    def remember(self, record: RunRecord) -> None:
        """Take what the journal knows."""
        if record.closed_at is not None:
            self.closed[record.run] = record.closed_at
        for known, id_ in ((self.desired, record.desired), (self.ordered, record.ordered)):
            known.pop(record.run, None)
            if id_ is not None:
                known[record.run] = id_
        if record.left:
            self.left[record.run] = record.left
        if record.deleted is not None:
            self.deleted[record.run] = record.deleted

    def delete(self, run: str, up_to: Order, now: str) -> None:
        """An operator has deleted a run: it has ended, and nothing is known of it but up to where it went."""
        self.remember(RunRecord(run=run, closed_at=self.closed.get(run, now), deleted=up_to))

    def was_deleted(self, run: str, order: Order) -> bool:
        """Whether a version went, or goes, with its run."""
        return run in self.deleted and order <= self.deleted[run]

    def begins(self, run: str, newest: Order | None) -> int | None:
        """The generation that a deleted run begins with its next version; None where it has begun it."""
        deleted = self.deleted.get(run)
        return None if deleted is None or (newest is not None and newest > deleted) else deleted.generation + 1

    def record_of(self, run: str) -> RunRecord:
        closed, desired, ordered = self.closed.get(run), self.desired.get(run), self.ordered.get(run)
        left = self.left.get(run, {})
        return RunRecord(
            run=run,
            closed_at=closed,
            desired=desired,
            ordered=ordered,
            deleted=self.deleted.get(run),
            left=left,
        )

    def records(self) -> list[RunRecord]:
        """What the journal is to know of all runs of which it knows anything."""
        known = {*self.closed, *self.desired, *self.ordered, *self.deleted, *self.left}
        return [self.record_of(run) for run in sorted(known)]

    def count(self, engines: Iterable[EngineRecord], now: float) -> None:
        """Take which runs engines follow now."""
        runs = {engine.run for engine in engines if engine.run is not None}
        kept = {run: self.followed_since.get(run, now) for run in runs}
        self.followed_since.clear()
        self.followed_since.update(kept)
