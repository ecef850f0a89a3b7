"""How a delta gets to engines that know no deltas: what its copy is made from, and which copies stay. Pure.

    v1 full            engines load v1 itself
    v2 on v1           copy of v2 := v1 + v2                engines go there
    v3 on v2           copy of v3 := copy of v2 + v3        engines go there, and that of v2 is deleted

A copy is the whole model of a delta, in a folder of the service's own that engines load like any checkpoint:

    <root>/.refitd/copies/<exp~trial>/v000007-<unique>/     shards, index, config

A copy is made once, from the copy or the full version that the fewest deltas lead from, and is never written again. The
service that has made a copy believes it until it ends. Every other folder is worthless: a half-made one, one of an
earlier start, one that another program has changed. So readers count as those of a version's own files do, by leases
(`refitd.policy.leases`).

Which copies stay:

1  What this service did not put there is never touched.
2  While a copy of a run is being made, all of the run stay: it may be made from one.
3  A copy stays while an engine names its folder as what it serves, and may read it again.
4  A copy stays while an engine serves or loads its version, or goes there now, or would go back to it. One that is
   worthless stays only for engines that may be reading it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.policy.leases import DEAD_AFTER, LeaseKind, Views, leases
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER, Order, parse_version_folder, version_folder, version_id

COPY_STAGE = "copy"  # what its making is called among the stages of an update
COPIES = "copies"
COPIES_PATH = f"{SERVICE_FOLDER}/{COPIES}"
_NAME = re.compile(r"(v[^-]+)-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy as it lies there.

    Attributes:
        path: relative to the root.
        order: its version's; None where its name is that of none.
        digest: its version's; None where the copy is worthless, and so is `signature`.
        signature: what the folder looks like from outside.
        digests: its shards', as manifests have them. What is made from the copy later is held against them.
        fault: why it is none of this service's.
    """

    run: str
    name: str
    path: str
    bytes: int = 0
    order: Order | None = None
    digest: str | None = None
    signature: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    fault: str | None = None

    @property
    def version(self) -> str | None:
        """The id of the version that it was made of."""
        return None if self.order is None else version_id(self.run, self.order)

    @property
    def holds(self) -> str | None:
        """The id of the version whose contents it has; None where it is worthless."""
        return None if self.digest is None else self.version

    def proved(self, digest: str, signature: str, size: int, digests: Mapping[str, str]) -> "Copy":
        return replace(self, digest=digest, signature=signature, bytes=size, digests=digests)

    def doubted(self) -> "Copy":
        """The same folder, which is worthless now. Engines may still be reading it."""
        return replace(self, digest=None, signature=None)


def copy_name(order: Order, unique: str) -> str:
    """The name of a copy; `unique` is 32 hex digits."""
    return f"{version_folder(order)}-{unique}"


def order_in(name: str) -> Order | None:
    """The order of the version that a copy of this name is made of; None where the service gives no such names."""
    match = _NAME.fullmatch(name)
    return None if match is None else parse_version_folder(match[1])


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
        own = (self.source.id,) if isinstance(self.source, VersionRecord) else ()
        return frozenset((*own, *(delta.id for delta in self.deltas)))


def decide(
    target: VersionRecord, versions: Mapping[str, VersionRecord], copies: Sequence[Copy]
) -> Copy | MakeCopy | NoBase:
    """Return the copy of a SEALED delta that is there already, how to make one, or why none can be made now."""
    ready = next((copy for copy in copies if copy.holds == target.id), None)
    if ready is not None:
        return ready
    ways: list[MakeCopy] = []
    for copy in copies:
        way = None if copy.holds is None or copy.order is None else way_from(copy.order, target, versions)
        if way is not None:
            ways.append(MakeCopy(source=copy, deltas=way))
    chain = chain_of(target, versions)
    if not isinstance(chain, NoBase):
        ways.append(MakeCopy(source=chain[0], deltas=chain[1:]))
    elif not ways:
        return chain
    return min(ways, key=lambda way: len(way.deltas))  # of two alike a copy: the page cache has it


_READS = frozenset({LeaseKind.SERVING, LeaseKind.LOADING, LeaseKind.UNPROVEN})
_GOES_THERE = frozenset({LeaseKind.TARGET, LeaseKind.NEXT, LeaseKind.LAST_GOOD, LeaseKind.ROLLBACK})


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
