"""Finding NaNs and infinities in the bits of tensors, at the speed of memory.

One NaN in one tensor makes an engine answer token 0 for ever. Floating-point formats keep their infinities and NaNs at
the upper end of each sign's patterns, so two maxima find them, over the bits taken as signed and as unsigned integers:
reductions that need no memory. Only a block in which that hits is looked at value by value.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from refitd.catalog.header import Header

Bits = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with values that are not finite: the flat index of the first, and how many there are."""

    file: str
    tensor: str
    index: int
    count: int


class Probe(Protocol):
    """How to find such values in `bits`, unsigned integers of `itemsize` bytes, `parts` of which make an element."""

    @property
    def itemsize(self) -> int: ...
    @property
    def parts(self) -> int: ...
    def any(self, bits: Bits) -> bool:
        """Whether there is one."""
        ...

    def mask(self, bits: Bits) -> npt.NDArray[np.bool_]:
        """Which ones they are."""
        ...


@dataclass(frozen=True, slots=True)
class _Signed:
    """A format with a sign bit, in which every pattern from `least` on (without the sign) is not finite."""

    itemsize: int
    least: int
    parts: int = 1

    def any(self, bits: Bits) -> bool:
        positive, negative = bits.view(f"i{self.itemsize}").max(), bits.max()
        return int(positive) >= self.least or int(negative) >= self._sign | self.least

    def mask(self, bits: Bits) -> npt.NDArray[np.bool_]:
        return (bits & bits.dtype.type(self._sign - 1)) >= self.least

    @property
    def _sign(self) -> int:
        return 1 << (8 * self.itemsize - 1)


@dataclass(frozen=True, slots=True)
class _OnePattern:
    """A format of one byte with one NaN and no infinities."""

    pattern: int
    itemsize: int = 1
    parts: int = 1

    def any(self, bits: Bits) -> bool:
        return bool((bits == self.pattern).any())

    def mask(self, bits: Bits) -> npt.NDArray[np.bool_]:
        return bits == self.pattern


PROBES: dict[str, Probe] = {
    "BF16": _Signed(2, 0x7F80),
    "F16": _Signed(2, 0x7C00),
    "F32": _Signed(4, 0x7F80_0000),
    "F64": _Signed(8, 0x7FF << 52),
    "C64": _Signed(4, 0x7F80_0000, parts=2),
    "F8_E5M2": _Signed(1, 0x7C),
    "F8_E4M3": _Signed(1, 0x7F),  # a NaN of each sign, no infinities
    "F8_E8M0": _OnePattern(0xFF),
    "F8_E4M3FNUZ": _OnePattern(0x80),  # where other formats have minus zero
    "F8_E5M2FNUZ": _OnePattern(0x80),
}  # dtypes that are not here (integers, F4, F6) have no such values


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tensors of one dtype, bytes `start` to `end` of the file: small ones cost no call of their own."""

    probe: Probe
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
        return position - (position - self._runs[at].start) % self._runs[at].probe.itemsize

    def look(self, data: memoryview, position: int) -> None:
        """Look into `data`, which is at byte `position` of the file and begins and ends at boundaries."""
        at, end = bisect_right(self._ends, position), position + len(data)
        while at < len(self._runs) and self._runs[at].start < end:
            run = self._runs[at]
            start, stop = max(run.start, position), min(run.end, end)
            self._block(run.probe, data[start - position : stop - position], start)
            at += 1

    def _block(self, probe: Probe, data: memoryview, position: int) -> None:
        bits: Bits = np.frombuffer(data, dtype=f"<u{probe.itemsize}")
        if probe.any(bits):
            for item in np.flatnonzero(probe.mask(bits)).tolist():
                self._note(position + item * probe.itemsize, probe.itemsize * probe.parts)

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
        probe, start, end = PROBES.get(spec.dtype), header.data_start + spec.start, header.data_start + spec.end
        if run is not None and run.probe is probe and run.end == start:
            run = _Run(run.probe, run.start, end)
            continue
        if run is not None:
            yield run
        run = _Run(probe, start, end) if probe is not None and end > start else None
    if run is not None:
        yield run
