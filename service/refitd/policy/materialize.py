"""How a delta gets to engines that know no deltas: what its copy is made from, and which copies stay. Pure.

    v1 full            engines load v1 itself
    v2 on v1           copy of v2 := v1 + v2                engines go there
    v3 on v2           copy of v3 := copy of v2 + v3        engines go there, and that of v2 is deleted

A copy is the whole model of a delta, in a folder of the service's own that engines load like any checkpoint. It gets
its name by a rename, when all its bytes are on stable storage and their fingerprints were found right.

    <root>/.refitd/copies/<exp~trial>/v000007-<unique>/     shards, index, config, and the note: what was proved of them
    <root>/.refitd/copies/<exp~trial>/.v000007-<unique>/    one that is being made, or that a kill has left: worthless

A copy is made once, from the copy or the full version that the fewest deltas lead from. It is never written again, so
its readers count as those of a version's own files do, by leases (`refitd.policy.leases`).

Which copies stay:

1  What this service did not put there is never touched.
2  While a copy of a run is being made, all of the run stay: it may be made from one.
3  A copy stays while an engine names its folder as what it serves, and may read it again.
4  A copy stays while an engine serves or loads its version, or goes there now, or would go back to it. One that is
   worthless stays only for engines that may be reading it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.policy.leases import DEAD_AFTER, LeaseKind, Views, leases
from refitd.state.version import VersionRecord
from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import SERVICE_FOLDER, Order, parse_version_folder, version_folder, version_id

COPY_STAGE = "copy"  # what its making is called among the stages of an update
COPIES = "copies"
COPIES_PATH = f"{SERVICE_FOLDER}/{COPIES}"
NOTE = ".refitd-copy.json"  # loaders leave such names out, and it is no part of a folder's signature
MAX_NOTE_BYTES = 2 * MAX_MANIFEST_BYTES
FORMAT = 2
_NAME = re.compile(r"(\.?)(v[^-]+)-[0-9a-f]{32}")
_OF_OLD = re.compile(r"\.?[0-9a-f]{32}(\.json)?")  # an earlier refitd wrote deltas into two copies in turns


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a note says: the version's digest, and what the folder looks like from outside.

    `digests` are the shards', as manifests have them. What is made from the copy later is held against them.
    """

    format: int = FORMAT
    digest: str
    signature: str
    digests: dict[str, str] = {}  # msgspec makes each note a dict of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy as it lies there. `path` is relative to the root.

    `order` is its version's, None where its name is that of none. `digest` (the version's) and `signature` are None
    where it is worthless. `fault` says why it is none of this service's.
    """

    run: str
    name: str
    path: str
    bytes: int = 0
    order: Order | None = None
    digest: str | None = None
    signature: str | None = None
    fault: str | None = None

    @property
    def version(self) -> str | None:
        """The id of the version that it was made of."""
        return None if self.order is None else version_id(self.run, self.order)

    @property
    def holds(self) -> str | None:
        """The id of the version whose contents it has; None where it is worthless."""
        return None if self.digest is None else self.version


def doubted(copy: Copy) -> Copy:
    """The same folder, whose contents nobody believes. Engines may still be reading it."""
    return replace(copy, digest=None, signature=None)


def copy_name(order: Order, unique: str) -> str:
    """The name of a copy; `unique` is 32 hex digits."""
    return f"{version_folder(order)}-{unique}"


def order_in(name: str) -> Order | None:
    """The order of the version that a whole copy of this name is made of."""
    match = _NAME.fullmatch(name)
    return None if match is None or match[1] else parse_version_folder(match[2])


def is_copy_name(name: str) -> bool:
    """Whether this service gives such names, or an earlier one did."""
    return _OF_OLD.fullmatch(name) is not None or _NAME.fullmatch(name) is not None


def parse_note(data: bytes) -> Note | None:
    """What a note says, None where it is none: then the copy is worthless."""
    try:
        note = from_json(data, Note)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return note if note.format == FORMAT else None


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
    """Decide about a SEALED delta."""
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
