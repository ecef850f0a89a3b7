"""Stretches of memory, as pairs of addresses (first byte, byte after the last), and copies as moves of memory. Pure.

Moves are as few as there can be, each of them one order to the driver. What follows each other on both sides is one
move, such as the projections of an expert that are stacked. A slice of columns is one move with two pitches.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

Span = tuple[int, int]
MOST_STRETCHES = 2_000_000  # of one tensor; more are not followed


class TooManyStretchesError(ValueError):
    """A tensor lies in more pieces than are followed."""


class NamedSpans:
    """Disjoint stretches with names, found by address."""

    def __init__(self, spans: Iterable[tuple[int, int, str]]) -> None:
        self._spans = sorted(span for span in spans if span[0] < span[1])
        self._begins = [begin for begin, _, _ in self._spans]

    def at(self, address: int) -> tuple[str, int] | None:
        """The name of the stretch that holds an address, and where that stretch begins."""
        place = bisect_right(self._begins, address) - 1
        if place < 0:
            return None
        begin, end, name = self._spans[place]
        return (name, begin) if address < end else None


class Covered:
    """Stretches that may overlap, merged."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = merged(spans)
        self._begins = [begin for begin, _ in self.spans]

    def touches(self, begin: int, end: int) -> bool:
        """Whether any byte of [begin, end) is covered."""
        place = bisect_right(self._begins, begin) - 1
        if place >= 0 and begin < self.spans[place][1]:
            return begin < end
        return place + 1 < len(self.spans) and self.spans[place + 1][0] < end

    def meets(self, other: "Covered") -> bool:
        """Whether any byte is covered by both."""
        return any(other.touches(*span) for span in self.spans)

    def without(self, other: "Covered") -> int:
        """How many of these bytes are not covered by `other`."""
        return sum(end - begin for begin, end in self.spans) - _common(self.spans, other.spans)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint, and none that touches the next."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def stretches(address: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> Iterator[Span]:
    """The memory of a strided tensor. Strides count elements. Raises TooManyStretchesError."""
    if 0 in shape:
        return
    dimensions = sorted(((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1), reverse=True)
    run = 1
    while dimensions and dimensions[-1][0] == run:  # the inner dimensions that lie without gaps
        run *= dimensions.pop()[1]
    if prod(size for _, size in dimensions) > MOST_STRETCHES:
        raise TooManyStretchesError
    for begin in _begins(address, itemsize, dimensions):
        yield begin, begin + run * itemsize


def _begins(address: int, itemsize: int, dimensions: Sequence[tuple[int, int]]) -> Iterator[int]:
    if not dimensions:
        yield address
        return
    stride, size = dimensions[0]
    for index in range(size):
        yield from _begins(address + index * stride * itemsize, itemsize, dimensions[1:])


def _common(some: Sequence[Span], others: Sequence[Span]) -> int:
    """The bytes that two lists of sorted, disjoint stretches have in common."""
    total = place = 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return total


@dataclass(frozen=True, slots=True)
class StridedRows:
    """A copy of `rows` rows of `columns` elements. Strides count elements, of a side from row to row and in a row."""

    rows: int
    columns: int
    source_row: int
    target_row: int
    source_column: int
    target_column: int


def rows_of(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> StridedRows | None:
    """A copy as rows, from the strides of both sides; None where it has more dimensions than two. The source's longer
    strides are those of the rows.
    """
    match merge_dimensions(shape, source, target):
        case []:
            return StridedRows(1, 1, 1, 1, 1, 1)
        case [(size, some, other)] if some == 1:
            return StridedRows(1, size, size, size, 1, other)
        case [(size, some, other)]:  # a column of a matrix
            return StridedRows(size, 1, some, other, 1, 1)
        case [(rows, source_row, target_row), (columns, source_column, target_column)]:
            return StridedRows(rows, columns, source_row, target_row, source_column, target_column)
        case _:
            return None


def merge_dimensions(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """(size, stride in the source, stride in the target), the longest stride first. Dimensions that lie without gaps on
    both sides are one.
    """
    dimensions = sorted(
        ((size, some, other) for size, some, other in zip(shape, source, target, strict=True) if size != 1),
        key=lambda each: each[1],
        reverse=True,
    )
    found: list[tuple[int, int, int]] = []
    for size, some, other in dimensions:
        if found and found[-1][1:] == (size * some, size * other):
            found[-1] = (found[-1][0] * size, some, other)
        else:
            found.append((size, some, other))
    return found


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """`rows` rows of `width` bytes from address `source` to `target`; pitches are bytes from row to row."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0

    @property
    def nbytes(self) -> int:
        return self.width * self.rows


def move_of(target: Any, strides: Sequence[int], source: int) -> MemoryMove | None:
    """The move into a tensor from an address, where elements of that dtype lie with such strides; None where it takes
    several.
    """
    size = target.element_size()
    rows = rows_of(tuple(target.shape), strides, target.stride())
    if rows is None or (rows.source_column, rows.target_column) != (1, 1):
        return None
    width = rows.columns * size
    if rows.rows == 1:
        return MemoryMove(target.data_ptr(), source, width)
    pitches = rows.target_row * size, rows.source_row * size
    if min(pitches) < width:
        return None
    return MemoryMove(target.data_ptr(), source, width, rows.rows, *pitches)


def joined(moves: Iterable[MemoryMove]) -> list[MemoryMove]:
    """The same with neighbours as one move, in order of their sources. No two may write to the same place."""
    found: list[MemoryMove] = []
    for move in sorted(moves, key=lambda move: move.source):
        last = found[-1] if found else None
        ends = (0, 0) if last is None else (last.source + last.width, last.target + last.width)
        if last is not None and last.rows == move.rows == 1 and ends == (move.source, move.target):
            found[-1] = replace(last, width=last.width + move.width)
        else:
            found.append(move)
    return found
