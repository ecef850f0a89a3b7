"""Which rank writes what where: decided once, by rank 0, from what all ranks say they hold (claims). Pure.

Files are cut by the same code as those of a gathered save, so they have the same names, headers and order of tensors.
A box that several ranks hold is shared out over them: a large one in equal parts, a small one to the rank that has
least to write. So a replicated model is written by all its ranks at once, and an HSDP model by all its replicas.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from refitd_client.checkpoint.header import Entry
from refitd_client.sharded.boxes import Box, tile
from refitd_client.tensors.names import without_second_names
from refitd_client.tensors.source import TensorSource, entry_of, refused
from refitd_client.write import plan as shard
from refitd_client.write.shards import TensorShards

# Below this a box is not split: opening another range costs more than writing it.
_SPLIT_BYTES = 2**18
# Parts end at whole pages as seen from the box, so that two ranks seldom write to one page.
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rank's part of one tensor, without its bytes.

    `name` and `dtype` (torch's name) are those of the published tensor, `shape` is the whole tensor's. `memory` is the
    first of this rank's names for the same memory, None where the rank's part is empty. `second` says that the module
    declares the name to be a second one of a tied weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    memory: str | None
    second: bool = False


@dataclass(frozen=True, slots=True)
class BoxHolder:
    """A rank that holds a box, and the box's number in that rank's claim."""

    rank: int
    box: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor that the claims of all ranks make up: every box of it, with the ranks that hold it.

    `memories` are the ranks' names for its memory, which two names of a tied weight have in common.
    """

    entry: Entry
    shape: tuple[int, ...]
    holders: dict[Box, list[BoxHolder]]
    memories: tuple[str | None, ...]
    second: bool


@dataclass(frozen=True, slots=True)
class WritePart:
    """Elements `begin` to `end` of a rank's box `box` of tensor `name`."""

    name: str
    box: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor lies: the number of its file, and its first byte there."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayout:
    """A version's files, where each tensor lies in them, and the parts that each rank writes.

    `shared` has the groups of ranks that hold the same box, by tensor: their samples have to agree.
    """

    shards: TensorShards
    locations: dict[str, Location]
    parts: list[list[WritePart]]
    shared: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])


def lay_out(
    claims: list[list[Claim]],
    *,
    inventory: Callable[[], frozenset[str] | None],
    max_shard_bytes: int | None,
    check_finite: bool,
) -> ShardedLayout:
    """Decide a version's layout.

    Args:
        claims: each rank's, by rank.
        inventory: returns the names in the base model's checkpoint, None if there is none.
        max_shard_bytes: the size of a file, None for the default.
        check_finite: whether NaN and infinity are refused.

    Raises:
        InvalidWeightsError: ranks disagree about a tensor, or hold no whole one together.
    """
    wholes = _united(claims)
    sources = [
        # Empty parts have no memory. Names of the same memory on every rank that has a part are one tied weight.
        TensorSource(entry=each.entry, memory=each.memories if any(each.memories) else None)
        for each in wholes.values()
    ]
    second = [f"^{re.escape(name)}$" for name, each in wholes.items() if each.second]
    sources = without_second_names(sources, inventory=inventory, second=second)
    cut = TensorShards(shards=shard.cut(sources, max_shard_bytes=max_shard_bytes), check_finite=check_finite)
    written = [wholes[source.entry.name] for source in sources]
    locations: dict[str, Location] = {}
    for number, file in enumerate(cut.shards):
        offset = len(file.header)
        for entry in file.entries:
            locations[entry.name] = Location(number, offset)
            offset += entry.nbytes
    shared = {
        each.entry.name: [[holder.rank for holder in holders] for holders in each.holders.values() if len(holders) > 1]
        for each in written
    }
    return ShardedLayout(
        shards=cut,
        locations=locations,
        parts=_parts(written, len(claims)),
        shared={name: groups for name, groups in shared.items() if groups},
    )


def spread(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Files for each rank to digest: the largest first, each to the rank that has least."""
    load = [0] * ranks
    spread: list[list[str]] = [[] for _ in range(ranks)]
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        rank = load.index(min(load))
        load[rank] += size
        spread[rank].append(name)
    return spread


def _united(claims: list[list[Claim]]) -> dict[str, WholeTensor]:
    """The tensors that the claims of all ranks make up, in order of rank 0's names and then of the others'."""
    by_name: dict[str, list[tuple[int, Claim]]] = {}
    for rank, own in enumerate(claims):
        for claim in own:
            by_name.setdefault(claim.name, []).append((rank, claim))
    wholes: dict[str, WholeTensor] = {}
    for name, found in by_name.items():
        first_rank, first = found[0]
        holders: dict[Box, list[BoxHolder]] = {}
        memories: list[str | None] = [None] * len(claims)
        for rank, claim in found:
            if (claim.dtype, claim.shape) != (first.dtype, first.shape):
                raise refused(
                    name,
                    f"is {first.dtype} of shape {list(first.shape)} on rank {first_rank} and {claim.dtype} of shape "
                    f"{list(claim.shape)} on rank {rank}: if these are parts of one tensor, pass DTensors or say so "
                    "with sharded={name: Sharded(dim, index, count)}",
                )
            memories[rank] = claim.memory
            for number, box in enumerate(claim.boxes):
                holders.setdefault(box, []).append(BoxHolder(rank, number))
        if not tile(holders, first.shape):
            raise refused(
                name,
                f"of shape {list(first.shape)} is not whole: the parts of ranks {[rank for rank, _ in found]} leave "
                "holes or overlap; is a rank missing from the process group, or a Sharded(...) wrong?",
            )
        wholes[name] = WholeTensor(
            entry=entry_of(name, first.dtype, first.shape),
            shape=first.shape,
            holders=holders,
            memories=tuple(memories),
            second=any(claim.second for _, claim in found),
        )
    return wholes


def _parts(wholes: Sequence[WholeTensor], ranks: int) -> list[list[WritePart]]:
    """The parts that each rank writes."""
    load = [0] * ranks
    parts: list[list[WritePart]] = [[] for _ in range(ranks)]
    for whole in wholes:
        count = prod(whole.shape)
        item = whole.entry.nbytes // count if count else 0  # bytes of one element, as torch counts elements
        for box, holders in whole.holders.items():
            if len(holders) == 1 or box.count * item < _SPLIT_BYTES:
                cuts = [(min(holders, key=lambda holder: (load[holder.rank], holder.rank)), 0, box.count)]
            else:
                step = -(-box.count // len(holders))
                step = -(-step // _PAGE) * _PAGE
                begins = range(0, box.count, step)
                ends = [min(box.count, begin + step) for begin in begins]
                cuts = list(zip(holders, begins, ends, strict=False))
            for holder, begin, end in cuts:
                load[holder.rank] += (end - begin) * item
                parts[holder.rank].append(WritePart(whole.entry.name, holder.box, begin, end))
    return parts
