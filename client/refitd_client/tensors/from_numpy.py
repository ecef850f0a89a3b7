"""numpy arrays as tensor sources."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.tensors.source import TensorSource, entry_of


def source(name: str, array: NDArray[Any]) -> TensorSource:
    """Check an array.

    Raises:
        InvalidWeightsError: its dtype cannot be served.
    """
    entry = entry_of(name, array.dtype.name, array.shape)
    return TensorSource(entry=entry, read=partial(_read, array), memory=_memory(array))


def _read(array: NDArray[Any]) -> NDArray[np.uint8]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


def _memory(array: NDArray[Any]) -> Hashable | None:
    if array.size == 0:
        return None
    return "numpy", array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
