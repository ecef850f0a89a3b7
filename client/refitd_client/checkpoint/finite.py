"""NaN and infinity, found in raw bytes: without torch, in the pass that digests and writes or reads them.

One NaN in one tensor makes an engine answer token 0 for ever.

In IEEE 754 types they are the values with all exponent bits set. The 8-bit types each have their own rule: E4M3 has
NaN only (all bits but the sign), the FNUZ types have one NaN where -0 would be, E8M0 has 0xFF. E2M1 has none.
(https://arxiv.org/abs/2209.05433, https://onnx.ai/onnx/technical/float8.html, OCP Microscaling Formats 1.0)
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Header, is_scales

Rule = tuple[int, int]
"""A mask and a pattern: an element is NaN or infinite if its bits under the mask are the pattern."""

NO_RULE: Rule = (0, 1)
"""The rule that no element meets."""

_SCALES = "F32>0"  # a dtype of this module alone

_RULES: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "C64": (np.uint32, 0x7F80_0000, 0x7F80_0000),  # each of the two numbers that an element is
    _SCALES: (np.uint32, 0x7F80_0000, 0x7F80_0000),
}
_NUMBERS_IN = {"C64": 2}  # numbers in an element, where these are more than one

_SIGNED: dict[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]]] = {
    np.uint64: np.int64,
    np.uint32: np.int32,
    np.uint16: np.int16,
    np.uint8: np.int8,
}
_ENDS = {
    dtype: (_SIGNED[bits], pattern, bits, pattern | 1 << (8 * bits().itemsize - 1))
    for dtype, (bits, mask, pattern) in _RULES.items()
    if mask == pattern and dtype not in {"F8_E8M0", _SCALES}
}
"""The least non-finite value of either sign where bits are read as signed integers, and as unsigned ones."""

_largest = np.maximum.reduce  # `max()` calls it after some Python code, for which other threads wait


def kind_of(name: str, dtype: str) -> str:
    """The `dtype` for the functions below. For scales another one: their zero and negative values count as well."""
    return _SCALES if is_scales(name, dtype) else dtype


def rule_of(dtype: str) -> Rule:
    """The mask and the pattern of a safetensors `dtype`, for searches on another device."""
    _, *rule = _RULES.get(dtype, (np.uint8, *NO_RULE))
    return rule[0], rule[1]


def width_of_number(dtype: str) -> int | None:
    """Bytes of a number that the rule applies to; None if the dtype has no non-finite values."""
    rule = _RULES.get(dtype)
    return None if rule is None else rule[0]().itemsize


def any_nonfinite(dtype: str, data: NDArray[np.uint8]) -> bool:
    """Whether any element of a safetensors `dtype` is NaN or infinite. `data` holds whole elements.

    Non-finite values are the largest of their sign when their bits are read as integers: two maxima find them, which
    write nothing and are faster than any comparison.
    """
    ends = _ENDS.get(dtype)
    if ends is None or not len(data):
        return count_nonfinite(dtype, data) > 0
    signed, positive, unsigned, negative = ends
    return bool(_largest(data.view(signed)) >= positive or _largest(data.view(unsigned)) >= negative)


def count_nonfinite(dtype: str, data: NDArray[np.uint8]) -> int:
    """How many elements of a safetensors `dtype` are NaN or infinite. `data` holds whole elements."""
    return 0 if dtype not in _RULES else int(np.count_nonzero(where_nonfinite(dtype, data)))


def where_nonfinite(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which numbers (`width_of_number`) of a `dtype` that has such values are NaN or infinite."""
    bits, mask, pattern = _RULES[dtype]
    if dtype == _SCALES:  # positive finite numbers are 1 to 0x7F7F_FFFF
        return data.view(bits) - bits(1) >= bits(0x7F7F_FFFF)
    return (data.view(bits) & bits(mask)) == bits(pattern)


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
    """Searches one file, a stretch of bytes at a time, and collects what is not finite.

    Stretches may come in any order, and from several threads at once. Only a block with a non-finite value in it is
    searched value by value.
    """

    def __init__(self, file: str, header: Header | None) -> None:
        self._file = file
        self._header = header or Header({}, 0, {})
        self._runs = list(_runs(self._header))
        self._ends = [run.end for run in self._runs]
        self._found: dict[int, tuple[int, int]] = {}
        self._lock = Lock()

    def boundary(self, position: int) -> int:
        """The last place at or before byte `position` of the file at which no value is cut in two."""
        at = bisect_right(self._ends, position)
        if at == len(self._runs) or position <= self._runs[at].start:
            return position
        return position - (position - self._runs[at].start) % self._runs[at].width

    def look(self, data: memoryview, position: int) -> None:
        """Search `data`, which is at byte `position` of the file and begins and ends at boundaries."""
        at, end = bisect_right(self._ends, position), position + len(data)
        while at < len(self._runs) and self._runs[at].start < end:
            run = self._runs[at]
            start, stop = max(run.start, position), min(run.end, end)
            block = np.frombuffer(data[start - position : stop - position], np.uint8)
            if any_nonfinite(run.dtype, block):
                width = run.width * _NUMBERS_IN.get(run.dtype, 1)
                for number in np.flatnonzero(where_nonfinite(run.dtype, block)).tolist():
                    value = start + number * run.width
                    tensor = bisect_right(self._starts, value) - 1
                    index = (value - self._starts[tensor]) // width
                    with self._lock:
                        first, count = self._found.get(tensor, (index, 0))
                        self._found[tensor] = min(first, index), count + 1
            at += 1

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, spec in self._header.tensors.items() if spec.end > spec.start]

    @cached_property
    def _starts(self) -> list[int]:
        return [self._header.data_start + self._header.tensors[name].start for name in self._names]

    @property
    def found(self) -> tuple[NonFinite, ...]:
        return tuple(NonFinite(self._file, self._names[at], *self._found[at]) for at in sorted(self._found))


def _runs(header: Header) -> Iterator[_Run]:
    for dtype, are_scales, start, end in header.stretches:
        kind = _SCALES if are_scales else dtype
        width = width_of_number(kind)
        if width is not None and end > start:
            yield _Run(kind, width, header.data_start + start, header.data_start + end)
