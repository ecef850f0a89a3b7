"""What the store keeps beside records: which engines and versions there are, and which runs have ended. Pure.

A run that has ended is closed, by an operator or by the trainer. It is not in trouble because no engine follows it;
engines that still follow it are free for a new run; of its versions collection keeps the newest good one, and a newer
one without a verdict. The next version that comes opens it again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from refitd.engine.fingerprints import means_of
from refitd.state.faults import FollowedUpstream
from refitd.state.records import EngineRecord, RunRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order


def _keys_of(record: EngineRecord | None) -> dict[tuple[str | None, ...], str | None]:
    """What an engine is found by beside its id and its run; with a fingerprint where it is what was looked for."""
    if record is None:
        return {}
    serving, configuration = record.serving, record.seen.configuration
    found: dict[tuple[str | None, ...], str | None] = {("proved", serving, configuration, record.contents.proof): None}
    for version, given in record.contents.given.items():
        found["given", version, configuration, *means_of(given)] = given
    held = {
        ("plugged", record.run): record.seen.plugin is not None,
        ("contradicted", serving): serving is not None and record.doubted is not None,
        ("serving", record.run, serving): serving is not None and record.known,
        ("at", record.address): record.address is not None,
    }
    return found | dict.fromkeys(key for key, holds in held.items() if holds)


class EngineIndex(dict[str, EngineRecord]):
    """The engines by id. They are put by `engines[id] = record`, and removed by `pop`. With a thousand engines, none of
    the questions here looks at all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_run: dict[str | None, dict[str, EngineRecord]] = {}
        self._by: dict[tuple[str | None, ...], dict[str, str | None]] = {}  # ids, in the order in which they came

    def __setitem__(self, name: str, record: EngineRecord) -> None:
        before = self.get(name)
        super().__setitem__(name, record)
        self._index(name, before, record)
        if before is None or before.run == record.run:
            self._of_run.setdefault(record.run, {})[name] = record
        else:  # engines of a run stay in the order of all engines, by which ties are broken
            del self._of_run[before.run][name]
            self._of_run[record.run] = {each.id: each for each in self.values() if each.run == record.run}

    def pop(self, name: str, default: EngineRecord | None = None) -> EngineRecord | None:  # type: ignore[override]
        """Remove an engine; return it, or the default where there is none."""
        record = super().pop(name, None)
        if record is None:
            return default
        self._index(name, record, None)
        self._of_run[record.run].pop(name, None)
        return record

    def _index(self, name: str, before: EngineRecord | None, after: EngineRecord | None) -> None:
        was, now = _keys_of(before), _keys_of(after)
        for key in was.keys() - now.keys():
            del self._by[key][name]
            if not self._by[key]:
                del self._by[key]  # a run serves a new version at each step
        for key, found in now.items():
            self._by.setdefault(key, {})[name] = found

    def of_run(self, run: str | None) -> list[EngineRecord]:
        """The engines that follow a run, in the order of all; with None those that follow none."""
        return list(self._of_run.get(run, {}).values())

    def at(self, address: str | None) -> list[EngineRecord]:
        """The engines whose server was last reached at an address; none for None."""
        return [self[name] for name in self._by.get(("at", address), ())]

    def serving(self, run: str | None, version: str | None) -> int:
        """How many engines of a run have known contents and serve a version."""
        return len(self._by.get(("serving", run, version), ()))

    def proved(self, serving: str | None, configuration: str | None, proof: str | None) -> list[EngineRecord]:
        """The engines of a configuration that serve a version by this proof."""
        return [self[name] for name in self._by.get(("proved", serving, configuration, proof), ())]

    def given(self, version: str, configuration: str | None, like: str) -> Mapping[str, str]:
        """What engines of a configuration gave for a version, by their ids, as far as it is comparable with `like`."""
        return cast("Mapping[str, str]", self._by.get(("given", version, configuration, *means_of(like)), {}))

    def contradicted(self, version: str) -> bool:
        """Whether engines contradict each other about a version, as far as they were told to."""
        return ("contradicted", version) in self._by

    def plugged(self, run: str | None) -> int:  # engines of a run that have refitd's plugin
        return len(self._by.get(("plugged", run), ()))


class VersionIndex:
    """`all` holds them by id, `open` those of them without a verdict. Both are changed here alone.

    `deleted_evidence` is the newest version of each run that was REJECTED or LOST and is DELETED: how a run stands does
    not change because files are deleted. `deleted_lost` has, by id, all that were LOST and are DELETED: an object store
    may still have them. It has versions with a manifest alone: no others are pushed, and they may be thousands.
    `deleted_newest` is, by run, the newest that was good or barred and is DELETED, `newest_ever` the newest that ever
    was.
    """

    def __init__(self) -> None:
        self.all: dict[str, VersionRecord] = {}
        self.open: dict[str, VersionRecord] = {}
        self.deleted_evidence: dict[str, VersionRecord] = {}
        self.deleted_lost: dict[str, VersionRecord] = {}
        self.deleted_newest: dict[str, Order] = {}
        self.newest_ever: dict[str, Order] = {}
        self._by_run: dict[str, dict[str, VersionRecord]] = {}
        self._in_order: dict[str, list[VersionRecord]] = {}
        self._newest: dict[str, Order] = {}
        self._paths = Counter[str]()

    def keep(self, record: VersionRecord) -> None:
        self._saw(record)
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
        self._saw(record)
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

    def _saw(self, record: VersionRecord) -> None:
        self.newest_ever[record.run] = max(record.order, self.newest_ever.get(record.run, record.order))

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
        return self._paths[path] > 0

    @property
    def runs(self) -> Collection[str]:
        return self._by_run.keys()


class Runs:
    """What is known of runs beside their versions, and `upstream` of the upstream that this host follows: None where it
    follows none, or has not looked yet. `followed_since` has since when engines follow a run (monotonic seconds). A run
    that is in neither is open, and no engine follows it. The other dictionaries have facts of `RunRecord`, by run,
    where there are any.
    """

    def __init__(self) -> None:
        self._known: dict[str, RunRecord] = {}
        self.followed_since: dict[str, float] = {}
        self.upstream: FollowedUpstream | None = None

    @property
    def closed(self) -> dict[str, str]:
        return self._having("closed_at")

    @property
    def desired(self) -> dict[str, str]:
        return self._having("desired")

    @property
    def ordered(self) -> dict[str, str]:
        return self._having("ordered")

    @property
    def deleted(self) -> dict[str, Order]:
        return self._having("deleted")

    @property
    def left(self) -> dict[str, dict[str, tuple[str, int]]]:
        return self._having("left")

    def _having(self, fact: str) -> dict[str, Any]:
        return {run: found for run, record in self._known.items() if (found := getattr(record, fact))}

    def set_upstream(self, word: FollowedUpstream) -> None:
        self.upstream = word

    def remember(self, record: RunRecord) -> None:
        self._known[record.run] = record

    def was_deleted(self, run: str, order: Order) -> bool:
        deleted = self.record_of(run).deleted
        return deleted is not None and order <= deleted

    def begins(self, run: str, newest: Order | None) -> int | None:
        """The generation that a deleted run begins with its next version; None where it has begun it."""
        deleted = self.record_of(run).deleted
        return None if deleted is None or (newest is not None and newest > deleted) else deleted.generation + 1

    def record_of(self, run: str) -> RunRecord:
        return self._known.get(run) or RunRecord(run=run)

    def records(self) -> list[RunRecord]:
        """What the journal is to know of all runs of which it knows anything."""
        return [self._known[run] for run in sorted(self._known)]

    def count(self, engines: Iterable[EngineRecord], now: float) -> None:
        runs = {engine.run for engine in engines if engine.run is not None}
        kept = {run: self.followed_since.get(run, now) for run in runs}
        self.followed_since.clear()
        self.followed_since.update(kept)
