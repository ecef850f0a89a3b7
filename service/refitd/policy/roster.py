"""Which engines there are: what the journal knows against what the operator names. Pure: both in, one list out.

What is known of an engine (contents that nobody can vouch for, loads that may still read, a resume that is owed)
belongs to its address and outlives every restart and every edit of the engines file: `removed` has what becomes of it
while nobody names the address. Another address is another engine.

Which run an engine follows is said by its source, and by moves. What was said last holds:

    the file says A, somebody moves it to B         B, whatever else changes in the file, and over restarts
    then the file says C                            C: it was changed, and names a run
    then the file says nothing of a run any more    B, if that was moved to: the file does not name another one
    the engine is taken out of the file             the move is forgotten with the engine
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from refitd.engine.engines_file import EngineSpec
from refitd.policy.moving import follows
from refitd.state.records import EngineRecord, Source


@dataclass(frozen=True, slots=True)
class Named:
    """An engine as the operator names it, and where."""

    spec: EngineSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What to drop (ids) and what to keep from now on: new records, changed ones and those that stay as they are."""

    drop: tuple[str, ...]
    keep: tuple[EngineRecord, ...]


def reconcile(
    records: Mapping[str, EngineRecord], named: Mapping[str, Named], sources: frozenset[Source]
) -> Reconciled:
    """Hold the records of engines that `sources` named against what they name now."""
    drop = [
        record.id
        for record in records.values()
        if (record.source in sources and record.id not in named)
        or (record.id in named and named[record.id].spec.url != record.url)
    ]
    keep = [_record(name, entry, None if name in drop else records.get(name)) for name, entry in named.items()]
    return Reconciled(drop=tuple(drop), keep=tuple(keep))


def _record(name: str, entry: Named, known: EngineRecord | None) -> EngineRecord:
    spec = entry.spec
    if known is None:
        named = spec.run is not None
        return EngineRecord(id=name, url=spec.url, run=spec.run, run_named=named, said=spec.run, source=entry.source)
    heard = replace(known, source=entry.source, said=spec.run)
    if known.moved and spec.run in {None, known.said}:
        return heard
    if spec.run is not None:
        return follows(replace(heard, moved=False), spec.run, named=True)
    if known.run_named:  # it is not said any more: the only run, or the service's, will do
        return follows(heard, None, named=False)
    return heard
