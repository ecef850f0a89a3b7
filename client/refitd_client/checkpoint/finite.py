"""NaN and infinity, found in raw bytes: without torch, in the pass that digests and writes or reads them.

In IEEE 754 types they are the values with all exponent bits set. The 8-bit types each have their own rule: E4M3 has
NaN only (all bits but the sign), the FNUZ types have one NaN where -0 would be, E8M0 has 0xFF. E2M1 has none.
(https://arxiv.org/abs/2209.05433, https://onnx.ai/onnx/technical/float8.html, OCP Microscaling Formats 1.0)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rule = tuple[int, int]
"""A mask and a pattern: an element is NaN or infinite if its bits under the mask are the pattern."""

NO_RULE: Rule = (0, 1)
"""What no element is."""

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
}
_NUMBERS = {"C64": 2}

_SIGNED: dict[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]]] = {
    np.uint64: np.int64,
    np.uint32: np.int32,
    np.uint16: np.int16,
    np.uint8: np.int8,
}
_ENDS = {
    dtype: (_SIGNED[bits], pattern, bits, pattern | 1 << (8 * bits().itemsize - 1))
    for dtype, (bits, mask, pattern) in _RULES.items()
    if mask == pattern and dtype != "F8_E8M0"
}
"""The least non-finite value of either sign where bits are read as signed integers, and as unsigned ones."""

_largest = np.maximum.reduce  # what `max()` comes to, some Python later: other threads wait meanwhile


def rule_of(dtype: str) -> Rule:
    """How a safetensors `dtype` tells, on whichever device: the same rule as here."""
    _, *rule = _RULES.get(dtype, (np.uint8, *NO_RULE))
    return rule[0], rule[1]


def width_of_number(dtype: str) -> int | None:
    """Bytes of what the rule looks at; None where a dtype has no such values."""
    rule = _RULES.get(dtype)
    return None if rule is None else rule[0]().itemsize


def numbers_of_element(dtype: str) -> int:
    """How many of these make an element."""
    return _NUMBERS.get(dtype, 1)


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
    return (data.view(bits) & bits(mask)) == bits(pattern)
