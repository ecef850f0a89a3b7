"""From a sharding to boxes: which part of a tensor the rank at some place of a mesh holds. Pure.

Splits follow `torch.chunk`: the first parts have the size rounded up, the last may be smaller or empty.

Along one dimension a rank holds a list of intervals. A plain split takes a part of that list; a strided one (which
FSDP2 makes of a tensor that tensor parallelism has split along the same dimension) cuts it into `stride` pieces first
and takes a part of each. Splits are applied from the first mesh dimension to the last. A strided split that undoes
exactly the splits to its right is applied after them, and then it is a plain one: that is what the trainer did, also
where sizes do not divide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from refitd_client.sharded.boxes import Box

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh dimension that splits tensor dimension `dim` into `count` parts, of which this rank has `index`."""

    dim: int
    index: int
    count: int
    stride: int = 1


def boxes_of(shape: Sequence[int], splits: Sequence[Split]) -> list[Box]:
    """The boxes that a rank holds, in the order in which they lie in its local tensor; none if that is empty."""
    sides = [intervals(size, [split for split in splits if split.dim == dim]) for dim, size in enumerate(shape)]
    return [
        Box(start=tuple(begin for begin, _ in corner), shape=tuple(end - begin for begin, end in corner))
        for corner in product(*sides)
        if all(end > begin for begin, end in corner)
    ]


def local_shape(shape: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(
        _length(intervals(size, [split for split in splits if split.dim == dim])) for dim, size in enumerate(shape)
    )


def intervals(size: int, splits: Sequence[Split]) -> list[Interval]:
    """What a rank holds of one dimension, by the splits of that dimension in order of the mesh."""
    held: list[Interval] = [(0, size)]
    for split in _in_order(splits):
        pieces = [_part(held, index, split.stride) for index in range(split.stride)]
        held = [interval for piece in pieces for interval in _part(piece, split.index, split.count)]
    return _joined(held)


def _in_order(splits: Sequence[Split]) -> list[Split]:
    now: list[Split] = []
    later: list[Split] = []
    for place, split in enumerate(splits):
        if split.stride > 1 and split.stride == prod(other.count for other in splits[place + 1 :]):
            later.insert(0, Split(dim=split.dim, index=split.index, count=split.count))
        else:
            now.append(split)
    return now + later


def _part(held: Sequence[Interval], index: int, count: int) -> list[Interval]:
    size = -(-_length(held) // count)
    return _between(held, size * index, size * (index + 1))


def _between(held: Sequence[Interval], first: int, last: int) -> list[Interval]:
    """The part of the intervals, laid end to end, that is between two places."""
    found: list[Interval] = []
    place = 0
    for begin, end in held:
        low, high = max(first - place, 0), min(last - place, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        place += end - begin
    return found


def _joined(held: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in held:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        elif begin < end:
            joined.append((begin, end))
    return joined


def _length(held: Sequence[Interval]) -> int:
    return sum(end - begin for begin, end in held)
