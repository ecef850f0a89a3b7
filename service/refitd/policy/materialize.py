"""How a delta gets to engines that know no deltas: who reads the copies, which is written from what, which stay. Pure.

A run has two copies. Engines read one (B), the other (A) is free, and is brought up to date while they serve:

    v1 full                 engines load v1 itself
    v2 on v1                A := v1 + v2                engines go to A
    v3 on v2                B := A + v3                 engines go to B: A is free
    v4 on v3                A += v3, v4                 engines go to A: B is free
    v5 on v4, A is read     B += v4, v5                 and so on

A copy that an engine reads, or may be reading, is never written, whatever waits for it. It may be read from. A copy is
written in place, so "probably free" is not enough: an engine that cannot be reached, a load whose end was not seen, and
a server that names the copy's folder as its model all count as readers, for ever. To delete a copy is another matter: a
deleted file reads on undisturbed, so the rules are those for versions (`refitd.policy.leases`).

Engines can come to rest on different copies: one on v4 in A, one on v5 in B, and then the files of v5 are lost, so that
no engine goes there any more. Neither copy comes free by itself. One more copy than usual is written then: the engines
go there, and the sweep deletes those that are too many.

Which copies stay:

1  What this service did not put there is never touched.
2  A copy that an engine may be reading stays, by the rules for versions.
3  A run needs none if none of its deltas can still be carried out (its trainer is gone, or publishes in full), or if it
   is closed and no engine follows it.
4  Of the others that no engine reads, at most `most` stay; the useless ones go first, then the older ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.policy.leases import DEAD_AFTER, EngineView, Lease, LeaseKind, Views, leases
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order

_READS = frozenset({LeaseKind.SERVING, LeaseKind.LOADING, LeaseKind.UNPROVEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """`reads` says in sentences who may read a copy: while there is one, it is not written.

    `is_waited_for` is False where all of them are engines that hold up no other. `holders` are their ids. `may_go`: it
    can be deleted.
    """

    reads: tuple[str, ...] = ()
    is_waited_for: bool = False
    holders: frozenset[str] = frozenset()
    may_go: bool = True


def readers_of(copies: Sequence[Copy], views: Views, paths: Mapping[str, Sequence[str]]) -> dict[str, Readers]:
    """The readers of each copy, by its name. `paths` are those that engines may name, by their ids."""
    for_ever, as_versions = leases(views, dead_after=float("inf")), leases(views)
    engines = {engine.id: engine for engine in views.engines}
    found: dict[str, Readers] = {}
    for copy in copies:
        version = copy.holds or copy.read_as or ""
        held = [lease for lease in for_ever.get(version, ()) if lease.kind in _READS]
        naming = [engines[name] for name in _naming(copy, paths) if name in engines]
        kept = [lease for lease in as_versions.get(version, ()) if lease.kind in _READS]
        found[copy.name] = Readers(
            reads=tuple(_sentences(held, naming)),
            is_waited_for=any(_counts(engines.get(lease.holder)) for lease in held) or any(map(_counts, naming)),
            holders=frozenset([lease.holder for lease in held] + [engine.id for engine in naming]),
            may_go=not kept and all(engine.unreachable_for >= DEAD_AFTER for engine in naming),
        )
    return found


def _naming(copy: Copy, paths: Mapping[str, Sequence[str]]) -> list[str]:
    """An engine may see the root elsewhere, so the path's end counts."""
    end = copy.path if copy.path.startswith("/") else f"/{copy.path}"
    return [name for name, named in paths.items() if any(path.endswith(end) for path in named)]


def _sentences(held: Sequence[Lease], naming: Sequence[EngineView]) -> Iterator[str]:
    yield from map(str, held)
    told = {lease.holder for lease in held}
    for engine in naming:
        if engine.id not in told:
            yield f"engine {engine.id} names its folder as what it serves, and may read it again"


def _counts(engine: EngineView | None) -> bool:
    """Whether the service waits for a reader. One that was removed during a load (None) reads until that ends."""
    return engine is None or engine.state.is_waited_for


@dataclass(frozen=True, slots=True)
class CopyReady:
    """A copy holds it already."""

    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCopy:
    """Bring the copy `into` (a new one, where it is None) to `source` with `deltas`, in this order.

    `source` is the copy itself where it is patched in place. `instead_of` is deleted first: no engine reads it.
    """

    target: VersionRecord
    source: Copy | VersionRecord
    deltas: tuple[VersionRecord, ...]
    into: Copy | None
    instead_of: Copy | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The versions that are read for it."""
        own = (self.source.id,) if isinstance(self.source, VersionRecord) else ()
        return (*own, *(delta.id for delta in self.deltas))


@dataclass(frozen=True, slots=True)
class WaitForCopy:
    """Not now; `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoCopyPossible:
    """No copy can hold the delta as things are; `reason` is a sentence."""

    reason: str


Decision = CopyReady | WriteCopy | WaitForCopy | NoCopyPossible
_Way = tuple[Copy | VersionRecord, tuple[VersionRecord, ...]]


def decide(
    target: VersionRecord,
    versions: Mapping[str, VersionRecord],
    copies: Sequence[Copy],
    readers: Mapping[str, Readers],
    *,
    most: int,
    last_good: str | None = None,
    misfits: Collection[str] = (),
    stays: Callable[[str], bool] = lambda _: False,
) -> Decision:
    """Decide about a SEALED delta.

    Args:
        target: the delta.
        versions: those that are known, by id.
        copies: those of its run.
        readers: who may read each, by its name.
        most: how many copies the run may have, besides those that only engines out of reach hold.
        last_good: the version that engines would be brought back to: its copy is written last.
        misfits: ids of versions from which the target was not reached, whatever the reason.
        stays: whether the engine of an id goes nowhere until the run's goals change.
    """
    ready = [copy for copy in copies if copy.holds == target.id]
    if ready:
        return CopyReady(min(ready, key=lambda copy: copy.name))
    ways = _ways(target, versions, copies, misfits)
    if not isinstance(ways, list):
        return ways
    free = [copy for copy in copies if not readers[copy.name].reads]
    free.sort(key=lambda copy: (copy.holds == last_good, copy.order is not None, copy.order or target.order, copy.name))
    for source, deltas in ways:
        if isinstance(source, Copy) and source in free and (source.holds != last_good or len(free) == 1):
            return WriteCopy(target=target, source=source, deltas=deltas, into=source)
    source, deltas = ways[0]
    if free:
        return WriteCopy(target=target, source=source, deltas=deltas, into=free[0])
    return _another(target, source, deltas, copies, readers, most + _is_one_lacking(readers, stays))


def _is_one_lacking(readers: Mapping[str, Readers], stays: Callable[[str], bool]) -> bool:
    """Whether engines stay on each of several copies, so that none comes free by itself."""
    waited_for = [each for each in readers.values() if each.is_waited_for]
    return len(waited_for) > 1 and all(any(map(stays, each.holders)) for each in waited_for)


def _another(
    target: VersionRecord,
    source: Copy | VersionRecord,
    deltas: tuple[VersionRecord, ...],
    copies: Sequence[Copy],
    readers: Mapping[str, Readers],
    most: int,
) -> Decision:
    if sum(readers[copy.name].is_waited_for for copy in copies) < most:
        gone = [copy for copy in copies if readers[copy.name].may_go and copy is not source]
        instead_of = gone[0] if gone else None
        return WriteCopy(target=target, source=source, deltas=deltas, into=None, instead_of=instead_of)
    said = "; ".join(f"{copy.path}: {readers[copy.name].reads[0]}" for copy in copies if readers[copy.name].reads)
    return WaitForCopy(f"each of the {len(copies)} copies of run {target.run} is read ({said})")


def _ways(
    target: VersionRecord, versions: Mapping[str, VersionRecord], copies: Sequence[Copy], misfits: Collection[str]
) -> list[_Way] | WaitForCopy | NoCopyPossible:
    """From where it can be reached, the fewest deltas first; a copy, which is warm, before a version's own files."""
    ways: list[_Way] = []
    for copy in copies:
        way = None if copy.order is None else way_from(copy.order, target, versions)
        if way is not None and copy.holds not in misfits:
            ways.append((copy, way))
    chain = chain_of(target, versions)
    if not isinstance(chain, NoBase) and chain[0].id not in misfits:
        ways.append((chain[0], chain[1:]))
    if ways:
        return sorted(ways, key=lambda way: len(way[1]))
    if not isinstance(chain, NoBase):
        return NoCopyPossible(f"what {chain[0].id} and the deltas on it come to is not what its fingerprints say")
    return NoCopyPossible(chain.reason) if chain.final else WaitForCopy(chain.reason)


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """What happens to a copy, and why."""

    copy: Copy
    keep: bool
    reason: str


def spare(
    copies: Sequence[Copy],
    readers: Mapping[str, Readers],
    *,
    runs: Collection[str],
    busy: Collection[str],
    most: int,
) -> list[CopyVerdict]:
    """Decide about all copies. `runs` have deltas; of those that are `busy` a copy is being written just now."""
    newest = sorted(copies, key=lambda copy: (copy.order or Order(0, 0), copy.name), reverse=True)
    kept: dict[str, int] = {}
    verdicts: list[CopyVerdict] = []
    for copy in newest:
        verdict = _verdict(copy, readers[copy.name], runs, busy, has_place=kept.get(copy.run, 0) < most)
        kept[copy.run] = kept.get(copy.run, 0) + verdict.keep
        verdicts.append(verdict)
    return verdicts


def _verdict(
    copy: Copy, readers: Readers, runs: Collection[str], busy: Collection[str], *, has_place: bool
) -> CopyVerdict:
    if copy.fault is not None:
        return CopyVerdict(copy, keep=True, reason=copy.fault)
    if copy.run in busy:
        return CopyVerdict(copy, keep=True, reason=f"a copy of run {copy.run} is being written")
    if not readers.may_go:
        return CopyVerdict(copy, keep=True, reason=(*readers.reads, "it may still be read")[0])
    if copy.run not in runs:
        return CopyVerdict(copy, keep=False, reason=f"run {copy.run} has no deltas any more, or has ended")
    if not has_place:
        return CopyVerdict(copy, keep=False, reason=f"run {copy.run} has other copies, and no engine reads this one")
    holds = copy.holds or "nothing yet"
    return CopyVerdict(copy, keep=True, reason=f"a copy for engines that know no deltas: it holds {holds}")
