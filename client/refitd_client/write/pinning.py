# pyright: basic
"""Memory that is mapped already, page-locked for GPUs by the CUDA driver's own functions.

The runtime's `cudaHostRegister` may fail (a small limit of locked memory, a driver that knows no read-only memory). Its
error stays behind then, and torch, which asks for the last error after each kernel, raises it in the trainer's next
one. The driver's functions leave nothing.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

PORTABLE, READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for every context of the process; the GPU will not write to it

_NO_DRIVER = 100  # CUDA_ERROR_NO_DEVICE


def pin(address: int, size: int, device: int, flags: int = PORTABLE) -> int:
    """Lock `size` bytes from `address` on, of whole pages; the driver's error, 0 for none. In any thread."""
    driver = _driver()
    if driver is None:
        return _NO_DRIVER
    with _current(driver, device) as error:
        return error or driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)


def unpin(address: int, device: int) -> None:
    """Undo `pin`, before the memory is unmapped. In any thread, and at the end of the process."""
    driver = _driver()
    if driver is not None:
        with _current(driver, device) as error:
            if not error:
                driver.cuMemHostUnregister(ctypes.c_void_p(address))


@contextmanager
def _current(driver: ctypes.CDLL, device: int) -> Generator[int]:
    """The context that torch uses on a GPU, in this thread, which may never have called CUDA. Gives an error, or 0."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    error = driver.cuDeviceGet(ctypes.byref(handle), device)
    error = error or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    if error:
        yield error
        return
    try:
        error = driver.cuCtxPushCurrent_v2(context)
        try:
            yield error
        finally:
            if not error:
                driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
