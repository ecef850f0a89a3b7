"""Memory that a prefetch worker and its rank both see: files without a name (memfd_create(2)), used again and again.

A rank with a GPU registers a buffer once, which takes longer than to fill it. What a rank still uses is never written.
"""

import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_plugin.prefetch.messages import BufferArray

_STEP = 2**24  # bytes: buffers are multiples of it, so that one a little larger is not needed next time


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffer:
    """One, as the prefetch worker has it."""

    number: int
    fd: int
    memory: NDArray[np.uint8] = field(repr=False)

    @property
    def address(self) -> int:
        """Its first byte, in this process."""
        return int(self.memory.ctypes.data)


class SharedBuffers:
    """The prefetch worker's."""

    def __init__(self) -> None:
        """None yet."""
        self._buffers: dict[int, SharedBuffer] = {}
        self._used: set[int] = set()
        self._last = 0

    def begin(self, busy: Collection[int]) -> None:
        """Another order: the rank uses some buffers still."""
        self._used = set(busy)

    @property
    def numbers(self) -> list[int]:
        """Those that there are."""
        return sorted(self._buffers)

    def memory(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, in a buffer that is not in use."""
        free = [buffer for number, buffer in self._buffers.items() if number not in self._used]
        fitting = [buffer for buffer in free if len(buffer.memory) >= size]
        if fitting:
            buffer = min(fitting, key=lambda buffer: len(buffer.memory))
        else:
            for small in free[:1]:  # it grows, as the rank sees it
                os.close(self._buffers.pop(small.number).fd)
            buffer = self._another(max(_STEP, -(-size // _STEP) * _STEP))
        self._used.add(buffer.number)
        return buffer.memory[:size]

    def place(self, array: NDArray[Any]) -> BufferArray:
        """Where an array lies; one that lies in no buffer is copied to one."""
        begin = int(array.ctypes.data)
        for buffer in self._buffers.values():
            if array.flags.c_contiguous and buffer.address <= begin < buffer.address + len(buffer.memory):
                return BufferArray(buffer.number, begin - buffer.address, len(array), array.dtype.str)
        there = self.memory(array.nbytes).view(array.dtype)
        there[:] = array
        return self.place(there)

    def of(self, number: int) -> SharedBuffer:
        """One of them."""
        return self._buffers[number]

    def _another(self, size: int) -> SharedBuffer:
        fd = os.memfd_create("refitd-delta", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._last += 1
        memory = np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        self._buffers[self._last] = buffer = SharedBuffer(self._last, fd, memory)
        return buffer
