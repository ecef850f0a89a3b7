"""Which rank writes what where: decided once, by rank 0, from what all ranks say they hold (claims). Pure.

Files are cut by the same code as those of a gathered save, so they have the same names, headers and order of tensors.
A box that several ranks hold is shared out over them: a large one in equal parts, a small one to the rank that has
least to write. So a replicated model is written by all its ranks at once, and an HSDP model by all its replicas.

A box is a rectangular part of a tensor. It is given by the index where it starts and its shape. In row-major order it
falls into runs that are contiguous in the whole tensor: one run where it is cut along the first dimension, one run a
row where it is cut along the last.

Splits follow `torch.chunk`: the first parts have the size rounded up, the last may be smaller or empty. Along one
dimension a rank holds a list of intervals. A plain split takes a part of that list; a strided one (which FSDP2 makes of
a tensor that tensor parallelism has split along the same dimension) cuts it into `stride` pieces first and takes a part
of each. Splits are applied from the first mesh dimension to the last. A strided split that undoes exactly the splits to
its right is applied after them, and then it is a plain one: that is what the trainer did, also where sizes do not
divide.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from math import prod

from refitd_client.checkpoint.header import Entry
from refitd_client.tensors import TensorSource, entry_of, refused
from refitd_client.write import plan as shard
from refitd_client.write.content import TensorShards
from refitd_client.write.plan import without_second_names

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part of a tensor starts, and its shape; as many numbers in each as the tensor has dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Elements `begin` to `end` of a box in row-major order, which lie in the whole tensor from element `at` on."""

    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh dimension that splits tensor dimension `dim` into `count` parts, of which this rank has `index`."""

    dim: int
    index: int
    count: int
    stride: int = 1


def whole_box(shape: Sequence[int]) -> Box:
    return Box(start=(0,) * len(shape), shape=tuple(shape))


def run_length(box: Box, shape: Sequence[int]) -> int:
    """How many elements of a box lie together in a tensor of a `shape`."""
    length = 1
    for size, full in zip(reversed(box.shape), reversed(shape), strict=True):
        length *= size
        if size != full:
            break
    return length


def runs(box: Box, shape: Sequence[int], begin: int, end: int) -> Iterator[ElementRun]:
    """The contiguous runs of a part of a box. `begin`: the first element of the part, counted in the box."""
    length = run_length(box, shape)
    while begin < end:
        at, stride, rest = 0, 1, begin
        for start, size, full in zip(reversed(box.start), reversed(box.shape), reversed(shape), strict=True):
            rest, index = divmod(rest, size)
            at += (start + index) * stride
            stride *= full
        stop = min(end, begin - begin % length + length)
        yield ElementRun(begin=begin, end=stop, at=at)
        begin = stop


def tile(boxes: Collection[Box], shape: Sequence[int]) -> bool:
    """Whether different boxes that form a grid, as shardings do, cover a tensor without a hole or an overlap.

    Their sides along each dimension have to follow on each other from end to end, and every combination of sides has
    to be there. An empty tensor needs none.
    """
    if prod(shape) == 0:
        return not boxes
    for dim, size in enumerate(shape):
        sides = sorted({(box.start[dim], box.start[dim] + box.shape[dim]) for box in boxes})
        if not sides or sides[0][0] != 0 or sides[-1][1] != size:
            return False
        if any(one[1] != other[0] for one, other in pairwise(sides)):
            return False
    corners = (len({box.start[dim] for box in boxes}) for dim in range(len(shape)))
    return len(boxes) == prod(corners)


def _why_not_whole(holders: Mapping[Box, Sequence["BoxHolder"]], shape: Sequence[int], ranks: int) -> str:
    """Whether boxes that do not tile a tensor overlap, or leave holes, and whose they are."""
    for one, other in combinations(holders, 2):
        sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
        if all(max(a, b) < min(a + size, b + length) for a, size, b, length in sides):
            return f"the parts of {ranks_named({holders[one][0].rank, holders[other][0].rank})} overlap"
    missing = prod(shape) - sum(box.count for box in holders)
    without = set(range(ranks)) - {each.rank for found in holders.values() for each in found}
    none = f", and {ranks_named(without)} {'has' if len(without) == 1 else 'have'} none of it" if without else ""
    return f"no rank holds {missing} of its {prod(shape)} elements{none}" if missing else "its parts are no grid"


def ranks_named(ranks: Collection[int]) -> str:
    """Some ranks, as a sentence names them: `rank 1`, `ranks 0, 1 and 3`."""
    *most, last = (str(rank) for rank in sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def boxes_of(shape: Sequence[int], splits: Sequence[Split]) -> list[Box]:
    """The boxes that a rank holds, in the order in which they lie in its local tensor; none if that is empty."""
    return [
        Box(start=tuple(begin for begin, _ in corner), shape=tuple(end - begin for begin, end in corner))
        for corner in product(*_sides(shape, splits))
        if all(end > begin for begin, end in corner)
    ]


def local_shape(shape: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    return tuple(_length(side) for side in _sides(shape, splits))


def _sides(shape: Sequence[int], splits: Sequence[Split]) -> list[list[Interval]]:
    """What a rank holds of each dimension, by the splits in order of the mesh."""
    sides: list[list[Interval]] = []
    for dim, size in enumerate(shape):
        held: list[Interval] = [(0, size)]
        for split in _in_order([split for split in splits if split.dim == dim]):
            pieces = [_part(held, index, split.stride) for index in range(split.stride)]
            held = [interval for piece in pieces for interval in _part(piece, split.index, split.count)]
        joined: list[Interval] = []
        for begin, end in held:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            elif begin < end:
                joined.append((begin, end))
        sides.append(joined)
    return sides


def _in_order(splits: Sequence[Split]) -> list[Split]:
    now: list[Split] = []
    later: list[Split] = []
    for place, split in enumerate(splits):
        if split.stride > 1 and split.stride == prod(other.count for other in splits[place + 1 :]):
            later.insert(0, replace(split, stride=1))
        else:
            now.append(split)
    return now + later


def _part(held: Sequence[Interval], index: int, count: int) -> list[Interval]:
    """Part `index` of `count` of some intervals laid end to end."""
    size = -(-_length(held) // count)
    first, last = size * index, size * (index + 1)
    found: list[Interval] = []
    place = 0
    for begin, end in held:
        low, high = max(first - place, 0), min(last - place, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        place += end - begin
    return found


def _length(held: Sequence[Interval]) -> int:
    return sum(end - begin for begin, end in held)


# Below this a box is not split: opening another range costs more than writing it.
_SPLIT_BYTES = 2**18
# Parts end at whole pages as seen from the box, so that two ranks seldom write to one page.
_PAGE_OF_PARTS = 4096


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedLayout:
    """The layout that was last agreed on, its number, and the claims that it was made from."""

    number: int
    claims: list[list[Claim]]
    layout: ShardedLayout


def lay_out(
    claims: list[list[Claim]],
    *,
    inventory: Callable[[], frozenset[str] | None],
    max_shard_bytes: int | None,
    check_finite: bool,
) -> ShardedLayout:
    """Decide a version's layout. `inventory`: returns the names in the base model's checkpoint, None if there is none.
    Raises InvalidWeightsError: ranks disagree about a tensor, or hold no whole one together.
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
        parts=shared_out(written, len(claims)),
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
            why = _why_not_whole(holders, first.shape, len(claims))
            raise refused(
                name,
                f"of shape {list(first.shape)} is not whole: {why}; is a rank missing from the process group, or a "
                "Sharded(...) missing or wrong?",
            )
        wholes[name] = WholeTensor(
            entry=entry_of(name, first.dtype, first.shape),
            shape=first.shape,
            holders=holders,
            memories=tuple(memories),
            second=any(claim.second for _, claim in found),
        )
    return wholes


def shared_out(wholes: Sequence[WholeTensor], ranks: int) -> list[list[WritePart]]:
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
                step = -(-step // _PAGE_OF_PARTS) * _PAGE_OF_PARTS
                begins = range(0, box.count, step)
                ends = [min(box.count, begin + step) for begin in begins]
                cuts = list(zip(holders, begins, ends, strict=False))
            for holder, begin, end in cuts:
                load[holder.rank] += (end - begin) * item
                parts[holder.rank].append(WritePart(whole.entry.name, holder.box, begin, end))
    return parts
