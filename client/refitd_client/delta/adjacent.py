"""Arrays that follow each other in memory, as one: an operation for all of them, and no copy to bring them together.

A delta's arrays lie so in its file. Beside SGLang's loop each operation costs a wait for the interpreter.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def together(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """One array that is all of some flat ones of a type, in their order; None where they do not lie so."""
    if not arrays or any(array.ndim != 1 or not array.flags.c_contiguous for array in arrays):
        return None
    begins = [_begin(array) for array in arrays]
    ends = [begin + array.nbytes for begin, array in zip(begins, arrays, strict=True)]
    if ends[:-1] != begins[1:] or any(array.dtype != arrays[0].dtype for array in arrays):
        return None
    memory = _memory(arrays[0])
    if any(_memory(array) != memory for array in arrays):  # neighbours by chance are let go of apart
        return None
    total = sum(len(array) for array in arrays)
    return np.lib.stride_tricks.as_strided(arrays[0], shape=(total,), strides=(arrays[0].itemsize,))


def _begin(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _memory(array: NDArray[Any]) -> int:
    """Which object has the memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return id(base.obj) if isinstance(base, memoryview) else id(cast("object", base))
