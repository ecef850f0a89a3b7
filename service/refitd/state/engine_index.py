"""The engines that are named, found by id, by run and by address: a thousand of them are not looked through for one."""

from collections import Counter
from collections.abc import Iterable, Mapping

from refitd.engine.fingerprints import means_of
from refitd.state.records import EngineRecord


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
        self._plugged[record.run] += by * (record.plugin is not None)
        proved = record.serving, record.configuration, record.proof
        if by > 0:
            self._proved.setdefault(proved, {})[record.id] = None
        else:
            del self._proved[proved][record.id]
            if not self._proved[proved]:
                del self._proved[proved]
        if record.doubted is not None and record.serving is not None:
            self._contradicted[record.serving] += by
        for version, found in record.given.items():
            given = self._gave.setdefault((version, record.configuration, means_of(found)), {})
            if by > 0:
                given[record.id] = found
            else:
                given.pop(record.id, None)
            if not given:
                del self._gave[version, record.configuration, means_of(found)]
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
