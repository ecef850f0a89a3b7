# pyright: basic
"""The CUDA driver's own functions: copies by address between page-locked host memory and a GPU, and page-locking.

Copies: torch takes 10 µs to begin one, and gives up the interpreter's lock for it; the driver takes 3 µs. A publication
begins hundreds of copies while the bus waits for them. Both ends must stay where they are until the stream has reached
the copy.

Page-locking: the runtime's `cudaHostRegister` may fail (a small limit of locked memory, a driver without read-only
memory). Its error stays behind then, and torch, which asks for the last error after each kernel, raises it in the
trainer's next one. The driver's functions leave nothing.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

Direction = Literal["up", "down"]

PORTABLE, READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for every context of the process; the GPU will not write to it

HOST_MEMORY, DEVICE_MEMORY = 1, 2  # CUmemorytype

_COPIES: dict[Direction, str] = {"up": "cuMemcpyHtoDAsync_v2", "down": "cuMemcpyDtoHAsync_v2"}
_NO_DRIVER = 100  # CUDA_ERROR_NO_DEVICE


def copy(direction: Direction, target: int, source: int, count: int, stream: Any) -> None:
    """Begin a copy between host memory and the GPU of a torch stream, which must be the current device.

    Args:
        direction: `up` to the GPU, `down` from it.
        target: address of the first byte to write.
        source: address of the first byte to read.
        count: bytes.
        stream: the torch stream that makes the copy.

    Raises:
        RuntimeError: the driver will not.
    """
    error = _copy_functions()[direction](target, source, count, stream.cuda_stream)
    if error:
        raise RuntimeError(f"the CUDA driver did not copy {count} bytes {direction} the bus: error {error}")


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: rows of bytes, a pitch apart on either side."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t), ("srcY", ctypes.c_size_t), ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p), ("srcDevice", ctypes.c_uint64), ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t), ("dstY", ctypes.c_size_t), ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p), ("dstDevice", ctypes.c_uint64), ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t),
    )  # fmt: skip


def copy_rows_down(target: int, pitch: int, source: int, width: int, rows: int, stream: Any) -> None:
    """Begin a copy of rows that lie together in a GPU's memory to rows of host memory that lie apart, as `copy`.

    Args:
        target: address of the first row's first byte to write.
        pitch: bytes from the begin of a row to the begin of the next, in host memory.
        source: address of the first byte to read.
        width: bytes of a row.
        rows: how many.
        stream: the torch stream that makes the copy.

    Raises:
        RuntimeError: the driver will not.
    """
    move = Memcpy2D(
        srcMemoryType=DEVICE_MEMORY, srcDevice=source, srcPitch=width,
        dstMemoryType=HOST_MEMORY, dstHost=target, dstPitch=pitch,
        WidthInBytes=width, Height=rows,
    )  # fmt: skip
    error = _copy_functions()["rows"](ctypes.byref(move), stream.cuda_stream)
    if error:
        raise RuntimeError(f"the CUDA driver did not copy {rows} rows of {width} bytes down the bus: error {error}")


def copy_here(target: int, source: int, count: int) -> None:
    """Copy `count` bytes at once, where both addresses are in host memory."""
    ctypes.memmove(target, source, count)


def has_driver() -> bool:
    """Whether `copy` can be used. Not with ROCm, whose tensors torch calls CUDA's as well."""
    return bool(_copy_functions())


@cache
def _copy_functions() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    if torch.version.cuda is None:
        return {}
    try:
        # PyDLL keeps the interpreter's lock: beginning a copy never waits here (see `CopiesAhead`).
        library = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return {}
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(Memcpy2D), ctypes.c_void_p]
    for name in _COPIES.values():
        function: Any = getattr(library, name)
        address = ctypes.c_uint64  # on either side
        function.argtypes = [address, address, ctypes.c_size_t, ctypes.c_void_p]
        function.restype = ctypes.c_int
    found: dict[str, Any] = {direction: getattr(library, name) for direction, name in _COPIES.items()}
    return found | {"rows": library.cuMemcpy2DAsync_v2}


def pin(address: int, size: int, device: int, flags: int = PORTABLE) -> int:
    """Page-lock mapped memory for GPUs, in any thread. Returns the driver's error, 0 for none.

    Args:
        address: of the first byte, at the begin of a page.
        size: bytes, of whole pages.
        device: the index of the GPU whose context is used.
        flags: `PORTABLE` and `READ_ONLY`.
    """
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
    """Enter the context that torch uses on a GPU; the thread may never have called CUDA. Yields an error, or 0."""
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
