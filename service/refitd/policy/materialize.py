"""How a delta gets to engines that know no deltas: which copy is written, from what. Pure; one decision out.

A run has two copies. Engines read one (B), the other (A) is free, and is brought up to date while they serve:

    v1 full                 engines load v1 itself
    v2 on v1                A := v1 + v2                engines go to A
    v3 on v2                B := A + v3                 engines go to B: A is free
    v4 on v3                A += v3, v4                 engines go to A: B is free
    v5 on v4, A is read     B += v4, v5                 and so on

A copy that an engine reads, or may be reading, is never written, whatever waits for it. It may be read from.

Engines can come to rest on different copies: one on v4 in A, one on v5 in B, and then the files of v5 are lost, so that
no engine goes there any more. Neither copy comes free by itself. One copy more than usual is written then: the engines
go there, and the sweep takes away what is too much.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.policy.copy_readers import Readers
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord


@dataclass(frozen=True, slots=True)
class Ready:
    """A copy holds it already."""

    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Bring the copy `into` (a new one, where it is None) to `source` with `deltas`, in this order.

    `source` is the copy itself where it is patched in place. `instead_of` goes first: nobody reads it any more.
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
class Wait:
    """Not now; `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """It cannot be carried out, unless something comes that nobody expects; `reason` is a sentence."""

    reason: str


Decision = Ready | Write | Wait | Hopeless
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
        return Ready(min(ready, key=lambda copy: copy.name))
    ways = _ways(target, versions, copies, misfits)
    if not isinstance(ways, list):
        return ways
    free = [copy for copy in copies if not readers[copy.name].reads]
    free.sort(key=lambda copy: (copy.holds == last_good, copy.order is not None, copy.order or target.order, copy.name))
    for source, deltas in ways:
        if isinstance(source, Copy) and source in free and (source.holds != last_good or len(free) == 1):
            return Write(target=target, source=source, deltas=deltas, into=source)
    source, deltas = ways[0]
    if free:
        return Write(target=target, source=source, deltas=deltas, into=free[0])
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
        return Write(target=target, source=source, deltas=deltas, into=None, instead_of=instead_of)
    said = "; ".join(f"{copy.path}: {readers[copy.name].reads[0]}" for copy in copies if readers[copy.name].reads)
    return Wait(f"each of the {len(copies)} copies of run {target.run} is read ({said})")


def _ways(
    target: VersionRecord, versions: Mapping[str, VersionRecord], copies: Sequence[Copy], misfits: Collection[str]
) -> list[_Way] | Wait | Hopeless:
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
        return Hopeless(f"what {chain[0].id} and the deltas on it come to is not what its fingerprints say")
    return Hopeless(chain.reason) if chain.final else Wait(chain.reason)
