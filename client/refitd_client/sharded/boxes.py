"""Boxes: rectangular parts of a tensor, where their bytes lie in it, and which of them a sharding gives a rank. Pure.

A box is given by the index where it starts and its shape. In row-major order it falls into runs that are contiguous in
the whole tensor: one run where it is cut along the first dimension, one run a row where it is cut along the last.

Splits follow `torch.chunk`: the first parts have the size rounded up, the last may be smaller or empty. Along one
dimension a rank holds a list of intervals. A plain split takes a part of that list; a strided one (which FSDP2 makes of
a tensor that tensor parallelism has split along the same dimension) cuts it into `stride` pieces first and takes a part
of each. Splits are applied from the first mesh dimension to the last. A strided split that undoes exactly the splits to
its right is applied after them, and then it is a plain one: that is what the trainer did, also where sizes do not
divide.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part of a tensor starts, and its shape; as many numbers in each as the tensor has dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it has."""
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
    """The box that is all of a tensor."""
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
    """The contiguous runs of a part of a box.

    Args:
        box: where it lies in the tensor.
        shape: the tensor's.
        begin: the first element of the part, counted in the box.
        end: the element after its last.
    """
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


def boxes_of(shape: Sequence[int], splits: Sequence[Split]) -> list[Box]:
    """The boxes that a rank holds, in the order in which they lie in its local tensor; none if that is empty."""
    return [
        Box(start=tuple(begin for begin, _ in corner), shape=tuple(end - begin for begin, end in corner))
        for corner in product(*_sides(shape, splits))
        if all(end > begin for begin, end in corner)
    ]


def local_shape(shape: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    """The shape of a rank's local tensor."""
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
