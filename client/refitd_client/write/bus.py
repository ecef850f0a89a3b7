# pyright: basic
"""Copies between page-locked host memory (`pinning`) and a GPU, by address.

torch takes 10 µs to begin a copy, and lets go of the interpreter's lock for it; the driver takes 3 µs. A publication
begins hundreds of copies while the bus waits for them.

Both ends must stay where they are until the stream has come so far.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import sys
from functools import cache
from typing import Any, Literal

Way = Literal["up", "down"]

_NAMES: dict[Way, str] = {"up": "cuMemcpyHtoDAsync_v2", "down": "cuMemcpyDtoHAsync_v2"}


def copy(way: Way, target: int, source: int, count: int, stream: Any) -> None:
    """Begin to copy bytes to (`up`) or from (`down`) the GPU of a torch stream, which must be the current device.

    Raises:
        RuntimeError: the driver will not.
    """
    error = _driver()[way](target, source, count, stream.cuda_stream)
    if error:
        raise RuntimeError(f"the CUDA driver did not copy {count} bytes {way} the bus: error {error}")


def copy_here(target: int, source: int, count: int) -> None:
    """The same at once, where both are in host memory."""
    ctypes.memmove(target, source, count)


def has_driver() -> bool:
    """Whether copies can be begun this way. Not with ROCm, whose tensors torch calls CUDA's as well."""
    return bool(_driver())


@cache
def _driver() -> dict[Way, Any]:
    torch: Any = sys.modules["torch"]
    if torch.version.cuda is None:
        return {}
    try:
        library = ctypes.PyDLL("libcuda.so.1")  # PyDLL keeps the interpreter's lock: nothing waits here (`ahead.py`)
    except OSError:
        return {}
    for name in _NAMES.values():
        function: Any = getattr(library, name)
        place = ctypes.c_uint64  # of an address on either side
        function.argtypes = [place, place, ctypes.c_size_t, ctypes.c_void_p]
        function.restype = ctypes.c_int
    return {way: getattr(library, name) for way, name in _NAMES.items()}
