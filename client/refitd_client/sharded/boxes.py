"""Boxes: rectangular parts of a tensor, and where their bytes lie in the whole one. Pure.

A box is given by the index where it starts and its shape. In row-major order it falls into runs that are contiguous in
the whole tensor: one run where it is cut along the first dimension, one run a row where it is cut along the last.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod


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
class Run:
    """Elements `begin` to `end` of a box in row-major order, which lie in the whole tensor from element `at` on."""

    begin: int
    end: int
    at: int


def whole(shape: Sequence[int]) -> Box:
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


def runs(box: Box, shape: Sequence[int], begin: int, end: int) -> Iterator[Run]:
    """The runs of elements `begin` to `end` of a box in a tensor of a `shape`."""
    length = run_length(box, shape)
    while begin < end:
        stop = min(end, begin - begin % length + length)
        yield Run(begin=begin, end=stop, at=_place(box, shape, begin))
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


def _place(box: Box, shape: Sequence[int], element: int) -> int:
    """The place in the whole tensor of an element of the box."""
    place, stride = 0, 1
    for start, size, full in zip(reversed(box.start), reversed(box.shape), reversed(shape), strict=True):
        element, index = divmod(element, size)
        place += (start + index) * stride
        stride *= full
    return place
