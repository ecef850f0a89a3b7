# pyright: basic
"""Copies between page-locked host memory and a GPU, by address, and the locking of pages.

torch takes 10 µs to begin a copy, and lets go of the interpreter's lock for it; the driver takes 3 µs. A publication
begins hundreds of copies while the bus waits for them.

Both ends must stay where they are until the stream has come so far.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

Way = Literal["up", "down"]

_NAMES: dict[Way, str] = {"up": "cuMemcpyHtoDAsync_v2", "down": "cuMemcpyDtoHAsync_v2"}
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process
_NO_DRIVER = 100  # CUDA_ERROR_NO_DEVICE


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


def register(address: int, count: int, device: int) -> int:
    """Have the driver pin host memory, so that a GPU copies to and from it by itself. Gives its error, 0 for none.

    The runtime would remember a refusal, and torch would raise it at its next kernel, whoever launches that. `device`
    is the number of a GPU that has a context.
    """
    if not has_driver():
        return _NO_DRIVER
    with _context(device):
        return _library().cuMemHostRegister_v2(ctypes.c_uint64(address), ctypes.c_size_t(count), _PORTABLE)


def unregister(address: int, device: int) -> None:
    """Undo it."""
    with _context(device):
        _library().cuMemHostUnregister(ctypes.c_uint64(address))


@contextmanager
def _context(device: int) -> Generator[None, None, None]:
    """The context that torch has on a GPU, whether this thread has ever worked there or not."""
    driver, number, context = _library(), ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(number), ctypes.c_int(device))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    is_here = driver.cuCtxPushCurrent_v2(context) == 0  # not at the end of the process: then nothing is to be popped
    try:
        yield
    finally:
        if is_here:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(number)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # lets go of the interpreter's lock: to pin 3 GB takes a quarter of a second


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
