"""Stretches of memory, as pairs of addresses (first byte, byte after the last). Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod

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
    """The memory of a strided tensor.

    Args:
        address: of its first element.
        itemsize: bytes of an element.
        shape: of the tensor.
        strides: in elements.

    Raises:
        TooManyStretchesError: there are more than two million.
    """
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
