"""Which engines there are: what the journal knows against what the operator names. Pure: both in, one list out.

What is known of an engine (contents that nobody can vouch for, loads that may still read, a resume that is owed)
belongs to its address and outlives every restart and every edit of the engines file: `removed` has what becomes of it
while nobody names the address. Another address is another engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from refitd.engine.engines_file import EngineSpec
from refitd.rollout.record import EngineRecord, Source


@dataclass(frozen=True, slots=True)
class Named:
    """An engine as the operator names it, and where."""

    spec: EngineSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Roster:
    """What to drop (ids) and what to keep from now on: new records, changed ones and those that stay as they are."""

    drop: tuple[str, ...]
    keep: tuple[EngineRecord, ...]


def reconcile(records: Mapping[str, EngineRecord], named: Mapping[str, Named], sources: frozenset[Source]) -> Roster:
    """Hold the records of engines that `sources` named against what they name now."""
    drop = [
        record.id
        for record in records.values()
        if (record.source in sources and record.id not in named)
        or (record.id in named and named[record.id].spec.url != record.url)
    ]
    keep = [_record(name, entry, None if name in drop else records.get(name)) for name, entry in named.items()]
    return Roster(drop=tuple(drop), keep=tuple(keep))


def _record(name: str, entry: Named, known: EngineRecord | None) -> EngineRecord:
    spec = entry.spec
    if known is None:
        return EngineRecord(id=name, url=spec.url, run=spec.run, run_named=spec.run is not None, source=entry.source)
    if spec.run is not None:
        return _follows(replace(known, source=entry.source), spec.run, named=True)
    if known.run_named:  # it is not said any more: the only run, or the service's, will do
        return _follows(replace(known, source=entry.source), None, named=False)
    return replace(known, source=entry.source)


def _follows(record: EngineRecord, run: str | None, *, named: bool) -> EngineRecord:
    """It holds what it holds; but what another run calls served is nothing for this one."""
    if record.run == run:
        return replace(record, run_named=named)
    return replace(record, run=run, run_named=named, serving=None, strikes={})
