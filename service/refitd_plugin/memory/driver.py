"""The three functions of the CUDA driver that torch does not offer: copies by address, and what an address is of.

torch copies a slice of columns through a temporary in pageable memory, at a fifth of the bus. All of it works in the
context that torch has made current in this thread. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html

Files of versions stay mapped and registered with the driver, so that a GPU reads them without a detour. Registering
takes 80 ms a gigabyte. A slot's file keeps its inode when its slot is written again, so it is registered once. A
registration ends when its file is deleted or was not read for some versions, and no mapping of it is used.

Only tmpfs: there the pages of a file are its memory, and what the trainer writes to them is there for the GPU. Mapped
for reading, wherever the driver registers such memory: an engine can write to no version.
"""

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np

from refitd_client.files.durable import STAT_BLOCK
from refitd_client.files.plain_file import is_tmpfs
from refitd_client.write.cuda import DEVICE_MEMORY, HOST_MEMORY, PORTABLE, READ_ONLY, Memcpy2D, pin, unpin
from refitd_plugin.memory.spans import MemoryMove

_MAPPED = 13  # CU_POINTER_ATTRIBUTE_MAPPED: in a range that has memory behind it


class CudaDriverError(RuntimeError):
    """The driver refused. The message has its number."""


def to_device(move: MemoryMove, above: int, stream: int) -> None:
    """Begin a move from page-locked host memory to the device of the current context. `above`: the address that the
    move's source is counted from.

    Raises:
        CudaDriverError: the driver refused.
    """
    _begin(move, above, stream, HOST_MEMORY)


def between_devices(move: MemoryMove, above: int, stream: int) -> None:
    """The same from memory of a device, which may be another process's or another GPU's."""
    _begin(move, above, stream, DEVICE_MEMORY)


def _begin(move: MemoryMove, above: int, stream: int, memory: int) -> None:
    is_host, source = memory == HOST_MEMORY, above + move.source
    if move.rows == 1:
        copy = _library().cuMemcpyHtoDAsync_v2 if is_host else _library().cuMemcpyDtoDAsync_v2
        error = copy(move.target, source, move.width, stream)
    else:
        pitched = Memcpy2D(
            srcMemoryType=memory, srcHost=source if is_host else None, srcDevice=0 if is_host else source,
            srcPitch=move.source_pitch, dstMemoryType=DEVICE_MEMORY, dstDevice=move.target,
            dstPitch=move.target_pitch, WidthInBytes=move.width, Height=move.rows,
        )  # fmt: skip
        error = _library().cuMemcpy2DAsync_v2(ctypes.byref(pitched), stream)
    if error:
        place = "to the device" if is_host else "between devices"
        raise CudaDriverError(f"the driver refused a copy of {move.nbytes} bytes {place} (error {error})")


def is_mapped(address: int) -> bool:
    """Whether memory is behind an address of a device: not where torch_memory_saver has released it."""
    found = ctypes.c_int(1)
    error = _library().cuPointerGetAttribute(ctypes.byref(found), _MAPPED, address)
    return not error and bool(found.value)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(Memcpy2D), ctypes.c_void_p)
    library.cuPointerGetAttribute.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_uint64)
    return library


logger = logging.getLogger("refitd_plugin")

_KEPT_VERSIONS = 8  # versions
_Key = tuple[int, int, int]


class Registered:
    """One file, mapped and registered until this object is collected."""

    def __init__(self, fd: int, size: int, device: int) -> None:
        """Map and register a file that is open for reading.

        Raises:
            OSError: the driver will not, as with too small a limit of locked memory; or it cannot be mapped.
        """
        self._fd = os.dup(fd)  # keeps the inode's number from being given to another file
        try:
            memory, self.address = _mapped(self._fd, size, device)
        except BaseException:
            os.close(self._fd)
            raise
        self.bytes: Any = (ctypes.c_uint8 * size).from_address(self.address)
        finalize(self, _unregister, memory, self._fd, self.address, device)

    @property
    def is_gone(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0


class Registry:
    """All files that one rank has registered. `of` may be called in any thread."""

    def __init__(self) -> None:
        self._files: dict[_Key, tuple[Registered, int]] = {}
        self._in_memory: dict[int, bool] = {}
        self._refused = False
        self._turn = threading.Lock()
        self._version = 0

    def begin(self) -> None:
        """Begin with another version: drop files that were deleted, or not read for some versions."""
        with self._turn:
            self._version += 1
            self._files = {
                key: (file, last)
                for key, (file, last) in self._files.items()
                if not file.is_gone and self._version - last < _KEPT_VERSIONS
            }

    def of(self, fd: int, device: int) -> Registered | None:
        """An open file, registered; None where it cannot be. Logs the reason once."""
        status = os.fstat(fd)
        is_whole = status.st_blocks * STAT_BLOCK >= status.st_size > 0  # a hole is a page that is not there
        if status.st_dev not in self._in_memory:
            self._in_memory[status.st_dev] = is_tmpfs(status.st_dev)
        if self._refused or not is_whole or not self._in_memory[status.st_dev]:
            return None
        key = status.st_dev, status.st_ino, status.st_size
        with self._turn:
            try:
                file = self._files[key][0] if key in self._files else Registered(fd, status.st_size, device)
            except OSError as error:
                self._refused = True
                logger.warning("refitd cannot register files, they go through pinned buffers: %s", error)
                return None
            self._files[key] = file, self._version
            return file

    def __len__(self) -> int:
        return len(self._files)


def _mapped(fd: int, size: int, device: int) -> tuple[mmap.mmap, int]:
    """Map a file for reading. Where the driver registers no such memory, and the file may be written, map it for
    writing.
    """
    try:
        return _registered(fd, size, mmap.PROT_READ, device, PORTABLE | READ_ONLY)
    except OSError:
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _registered(writable, size, mmap.PROT_READ | mmap.PROT_WRITE, device, PORTABLE)
        finally:
            os.close(writable)


def _registered(fd: int, size: int, prot: int, device: int, flags: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot)  # registering populates it
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    if error := pin(address, size, device, flags):
        memory.close()
        raise OSError(f"the CUDA driver did not register {size} bytes (error {error})")
    return memory, address


def _unregister(memory: mmap.mmap, fd: int, address: int, device: int) -> None:
    unpin(address, device)
    with suppress(BufferError):  # an array still uses it, and unmaps it when it is collected
        memory.close()
    os.close(fd)
