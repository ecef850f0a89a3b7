"""How a delta gets to engines that know no deltas: what its copy is made from, and which copies stay. Pure.

    v1 full            engines load v1 itself
    v2 on v1           copy of v2 := v1 + v2                engines go there
    v3 on v2           copy of v3 := copy of v2 + v3        engines go there, and that of v2 is deleted

A copy is made once, from the copy or the full version that the fewest deltas lead from. It is never written again, so
its readers count as those of a version's own files do, by leases (`refitd.policy.leases`).

Which copies stay:

1  What this service did not put there is never touched.
2  While a copy of a run is being made, all of the run stay: it may be made from one.
3  A copy stays while an engine names its folder as what it serves, and may read it again.
4  A copy stays while an engine serves or loads its version, or goes there now, or would go back to it. One that is
   worthless stays only for engines that may be reading it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.policy.leases import DEAD_AFTER, LeaseKind, Views, leases
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord

_READS = frozenset({LeaseKind.SERVING, LeaseKind.LOADING, LeaseKind.UNPROVEN})
_GOES_THERE = frozenset({LeaseKind.TARGET, LeaseKind.NEXT, LeaseKind.LAST_GOOD, LeaseKind.ROLLBACK})


@dataclass(frozen=True, slots=True)
class CopyReady:
    """There is a copy of it already."""

    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeCopy:
    """Make a copy of `target` from `source` with `deltas`, in this order."""

    source: Copy | VersionRecord
    deltas: tuple[VersionRecord, ...]

    @property
    def target(self) -> VersionRecord:
        """The version whose copy it is."""
        return self.deltas[-1]

    @property
    def needs(self) -> frozenset[str]:
        """The versions that are read for it."""
        own = (self.source.id,) if isinstance(self.source, VersionRecord) else ()
        return frozenset((*own, *(delta.id for delta in self.deltas)))


@dataclass(frozen=True, slots=True)
class WaitForCopy:
    """Not now; `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoCopyPossible:
    """No copy of the delta can be made as things are; `reason` is a sentence."""

    reason: str


Decision = CopyReady | MakeCopy | WaitForCopy | NoCopyPossible


def decide(target: VersionRecord, versions: Mapping[str, VersionRecord], copies: Sequence[Copy]) -> Decision:
    """Decide about a SEALED delta.

    Args:
        target: the delta.
        versions: those that are known, by id.
        copies: those of its run.
    """
    ready = next((copy for copy in copies if copy.holds == target.id), None)
    if ready is not None:
        return CopyReady(ready)
    ways: list[MakeCopy] = []
    for copy in copies:
        way = None if copy.holds is None or copy.order is None else way_from(copy.order, target, versions)
        if way is not None:
            ways.append(MakeCopy(source=copy, deltas=way))
    chain = chain_of(target, versions)
    if not isinstance(chain, NoBase):
        ways.append(MakeCopy(source=chain[0], deltas=chain[1:]))
    elif not ways:
        return NoCopyPossible(chain.reason) if chain.final else WaitForCopy(chain.reason)
    return min(ways, key=lambda way: len(way.deltas))  # of two alike a copy, which is warm


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """What happens to a copy, and why."""

    copy: Copy
    keep: bool
    reason: str


def spare(
    copies: Sequence[Copy],
    views: Views,
    paths: Mapping[str, Sequence[str]],
    *,
    busy: Collection[str] = (),
    wanted: Collection[str] = (),
) -> list[CopyVerdict]:
    """Decide about all copies.

    Args:
        copies: all of them.
        views: what engines do, and where they are to go.
        paths: those that engines may name, by their ids.
        busy: the runs of which a copy is being made.
        wanted: ids of versions that a copy would be made of at once.
    """
    held = leases(views)
    near = [engine.id for engine in views.engines if engine.unreachable_for < DEAD_AFTER]

    def why_kept(copy: Copy) -> str | None:
        if copy.fault is not None:
            return copy.fault
        if copy.run in busy:
            return f"a copy of run {copy.run} is being made"
        for name in near:  # an engine may see the root elsewhere, so the path's end counts
            if any(path.endswith(f"/{copy.path}") for path in paths.get(name, ())):
                return f"engine {name} names its folder as what it serves, and may read it again"
        kinds = _READS if copy.holds is None else _READS | _GOES_THERE
        needed = [str(lease) for lease in held.get(copy.version or "", ()) if lease.kind in kinds]
        if not needed and copy.holds in wanted:
            return f"engines are to go to {copy.holds}"
        return needed[0] if needed else None

    verdicts: list[CopyVerdict] = []
    for copy in copies:
        kept = why_kept(copy)
        gone = "it is no whole copy" if copy.holds is None else f"no engine needs {copy.holds} from it"
        verdicts.append(CopyVerdict(copy, keep=kept is not None, reason=kept or gone))
    return verdicts
