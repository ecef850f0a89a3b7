"""Finding NaNs and infinities in the bits of tensors, at the speed of memory.

One NaN in one tensor makes an engine answer token 0 for ever. What they are in each dtype, and how they are found in a
block, says `refitd_client.checkpoint.finite`. Only a block in which there is one is looked at value by value.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np

from refitd_client.checkpoint.finite import any_nonfinite, numbers_of_element, where_nonfinite, width_of_number
from refitd_client.checkpoint.strict_header import Header


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with values that are not finite: the flat index of the first, and how many there are."""

    file: str
    tensor: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tensors of one dtype, bytes `start` to `end` of the file: small ones cost no call of their own."""

    dtype: str
    width: int
    start: int
    end: int


class Search:
    """Goes through one file, a stretch of bytes at a time, and collects what is not finite.

    Stretches may come in any order, and from several threads at once.
    """

    def __init__(self, file: str, header: Header | None) -> None:
        self._file = file
        self._header = header or Header({}, 0, {})
        self._runs = list(_runs(self._header))
        self._ends = [run.end for run in self._runs]
        self._names = [name for name, spec in self._header.tensors.items() if spec.end > spec.start]
        self._starts = [self._header.data_start + self._header.tensors[name].start for name in self._names]
        self._found: dict[int, tuple[int, int]] = {}
        self._lock = Lock()

    def boundary(self, position: int) -> int:
        """The last place at or before `position` at which no value is cut in two."""
        at = bisect_right(self._ends, position)
        if at == len(self._runs) or position <= self._runs[at].start:
            return position
        return position - (position - self._runs[at].start) % self._runs[at].width

    def look(self, data: memoryview, position: int) -> None:
        """Look into `data`, which is at byte `position` of the file and begins and ends at boundaries."""
        at, end = bisect_right(self._ends, position), position + len(data)
        while at < len(self._runs) and self._runs[at].start < end:
            run = self._runs[at]
            start, stop = max(run.start, position), min(run.end, end)
            self._block(run, data[start - position : stop - position], start)
            at += 1

    def _block(self, run: _Run, data: memoryview, position: int) -> None:
        found = np.frombuffer(data, np.uint8)
        if any_nonfinite(run.dtype, found):
            for number in np.flatnonzero(where_nonfinite(run.dtype, found)).tolist():
                self._note(position + number * run.width, run.width * numbers_of_element(run.dtype))

    def _note(self, position: int, width: int) -> None:
        at = bisect_right(self._starts, position) - 1
        index = (position - self._starts[at]) // width
        with self._lock:
            first, count = self._found.get(at, (index, 0))
            self._found[at] = min(first, index), count + 1

    @property
    def found(self) -> tuple[NonFinite, ...]:
        """What was found so far, in the order of the file."""
        return tuple(NonFinite(self._file, self._names[at], *self._found[at]) for at in sorted(self._found))


def _runs(header: Header) -> Iterator[_Run]:
    run: _Run | None = None
    for spec in header.tensors.values():
        width, start, end = width_of_number(spec.dtype), header.data_start + spec.start, header.data_start + spec.end
        if run is not None and run.dtype == spec.dtype and run.end == start:
            run = _Run(run.dtype, run.width, run.start, end)
            continue
        if run is not None:
            yield run
        run = _Run(spec.dtype, width, start, end) if width is not None and end > start else None
    if run is not None:
        yield run
