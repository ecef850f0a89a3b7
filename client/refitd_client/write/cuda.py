# pyright: basic
"""Weights on a GPU into the files of a version, at the speed of the bus.

A recycled file on a tmpfs is mapped and registered with the driver once; from then on the GPU's copy engine writes into
the page cache itself. Other files are filled through two pinned buffers, one being copied while the other is written.

Nothing here makes a CUDA context: all is done in that of the GPU that a tensor lives on.

Copies and page-locking are the CUDA driver's own functions.

Copies: torch takes 10 µs to begin one, and gives up the interpreter's lock for it; the driver takes 3 µs. A publication
begins hundreds of copies while the bus waits for them. Both ends must stay where they are until the stream has reached
the copy.

Page-locking: the runtime's `cudaHostRegister` may fail (a small limit of locked memory, a driver without read-only
memory). Its error stays behind then, and torch, which asks for the last error after each kernel, raises it in the
trainer's next one. The driver's functions leave nothing.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

from refitd_client.tensors import TensorSource
from refitd_client.write.version_folder import StagedShard

Direction = Literal["up", "down"]

PORTABLE, READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for every context of the process; the GPU will not write to it

HOST_MEMORY, DEVICE_MEMORY = 1, 2  # CUmemorytype

_COPIES: dict[Direction, str] = {"up": "cuMemcpyHtoDAsync_v2", "down": "cuMemcpyDtoHAsync_v2"}
_NO_DRIVER = 100  # CUDA_ERROR_NO_DEVICE


def copy(direction: Direction, target: int, source: int, count: int, stream: Any) -> None:
    """Begin a copy of `count` bytes between host memory and the GPU of a torch stream, which must be the current
    device. `target` and `source` are addresses, and the copy goes `up` to the GPU or `down` from it. Raises
    RuntimeError if the driver will not.
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
    """Begin a copy, as `copy`, of rows of `width` bytes that lie together in a GPU's memory to rows of host memory,
    each of which begins `pitch` bytes after the one before. Raises RuntimeError if the driver will not.
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
    """Page-lock mapped memory of whole pages for GPUs, in any thread, in the context of GPU number `device`. Returns
    the driver's error, 0 for none. `flags` are `PORTABLE` and `READ_ONLY`.
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


_CUDA_PIECE = 32 * 2**20

_log = logging.getLogger("refitd_client")


class DeviceCopies:
    """The copies of one publication, on a stream of their own on each GPU: they wait for what the trainer computes."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._streams: dict[str, Any] = {}
        self._there: dict[str, Any] = {}  # by device: the context in which its stream is used
        self._buffers: list[_Buffer] = []
        self._is_by_address = has_driver()

    def copy(self, source: TensorSource, begin: int, end: int, file: StagedShard, offset: int) -> None:
        """Begin to copy bytes `begin` to `end` of a tensor into a file, from byte `offset` on. The tensor must not
        change before `synchronize`.
        """
        stream = self._stream_of(source.place)
        with self._there[source.place]:
            mapped = file.mapped
            if mapped is not None and not mapped.register(partial(register, device=self._torch.device(source.place))):
                mapped = None  # the GPU cannot write into it by itself
            if mapped is not None and source.is_view and self._is_by_address:
                copy("down", mapped.address + offset, source.address + begin, end - begin, stream)
                return
            with self._torch.cuda.stream(stream):  # a cast, too, is made and freed there
                flat = source.tensor().contiguous().view(-1).view(self._torch.uint8)[begin:end]
                if mapped is not None:
                    mapped.tensor[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                    return
                self._buffers = self._buffers or [_Buffer(self._torch), _Buffer(self._torch)]
                for start in range(0, flat.numel(), _CUDA_PIECE):
                    self._buffers.reverse()
                    self._buffers[0].take(flat[start : start + _CUDA_PIECE], file, offset + start)

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies that were begun have arrived. Partly filled buffers are written for it."""
        for buffer in self._buffers:
            buffer.flush()
        events: list[Any] = []
        for place, stream in self._streams.items():
            with self._there[place]:
                event = self._torch.cuda.Event(blocking=True)
                event.record(stream)
                events.append(event)

        def arrived() -> None:
            for event in events:
                event.synchronize()

        return arrived

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _stream_of(self, place: str) -> Any:
        if place not in self._streams:
            device = self._torch.device(place)
            stream = self._torch.cuda.Stream(device)
            stream.wait_stream(self._torch.cuda.current_stream(device))  # from here on this thread has a context
            self._streams[place] = stream
            is_current = device.index == self._torch.cuda.current_device()
            self._there[place] = nullcontext() if is_current else self._torch.cuda.device(device)
        return self._streams[place]


class _Buffer:
    """Pinned memory that a piece of a tensor goes through."""

    def __init__(self, torch: Any) -> None:
        self._memory = pinned(_CUDA_PIECE)
        self._torch = torch
        self._arrived: Any = None
        self._write: Callable[[], None] | None = None

    def take(self, piece: Any, file: StagedShard, offset: int) -> None:
        """Write the last piece to its file, then begin to copy this one, which goes to `offset` of `file`."""
        self.flush()
        memory = self._memory[: piece.numel()]
        memory.copy_(piece, non_blocking=True)
        self._arrived = self._torch.cuda.Event(blocking=True)  # a new one: the next piece may be another GPU's
        self._arrived.record()
        self._write = lambda: file.put(offset, memory.numpy())

    def flush(self) -> None:
        if self._write is not None:
            self._arrived.synchronize()
            self._write()
            self._write = None


def pinned(count: int) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def is_direct(file: StagedShard) -> bool:
    """Whether the GPU wrote a tensor into the file by itself, as it will all others."""
    return file.mapped is not None and file.mapped.tensor is not None


def register(memory: Any, device: Any) -> tuple[Any, Callable[[], None]] | None:
    """Have the driver pin mapped memory, so that copies to it need no buffer.

    Returns a tensor over the memory and the function that undoes it, or None if the driver will not, as with too small
    a limit of locked memory. `device` is a GPU that a tensor is on.
    """
    torch: Any = sys.modules["torch"]
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    error = pin(address, tensor.numel(), device.index)
    if error:
        _log.warning("memory cannot be registered with CUDA (error %d): copies to it go through a buffer", error)
        return None
    return tensor, partial(unpin, address, device.index)
