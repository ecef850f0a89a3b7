"""Memory that a clerk and its rank both see: files without a name (memfd_create(2)), used again and again.

A rank with a GPU registers a room once, which takes longer than to fill it. What a rank still uses is never written.
"""

import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_sglang.ahead.letters import Array

_STEP = 2**24  # bytes: rooms are multiples of it, so that one a little larger is not needed next time


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """One, as the clerk has it."""

    number: int
    fd: int
    memory: NDArray[np.uint8] = field(repr=False)

    @property
    def address(self) -> int:
        """Its first byte, in this process."""
        return int(self.memory.ctypes.data)


class Rooms:
    """The clerk's."""

    def __init__(self) -> None:
        """None yet."""
        self._rooms: dict[int, Room] = {}
        self._used: set[int] = set()
        self._last = 0

    def begin(self, busy: Collection[int]) -> None:
        """Another order: the rank uses some rooms still."""
        self._used = set(busy)

    @property
    def numbers(self) -> list[int]:
        """Those that there are."""
        return sorted(self._rooms)

    def memory(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, in a room that nobody uses."""
        free = [room for number, room in self._rooms.items() if number not in self._used]
        fitting = [room for room in free if len(room.memory) >= size]
        if fitting:
            room = min(fitting, key=lambda room: len(room.memory))
        else:
            for small in free[:1]:  # it grows, as the rank sees it
                os.close(self._rooms.pop(small.number).fd)
            room = self._another(max(_STEP, -(-size // _STEP) * _STEP))
        self._used.add(room.number)
        return room.memory[:size]

    def place(self, array: NDArray[Any]) -> Array:
        """Where an array lies; one that lies in no room is copied to one."""
        begin = int(array.ctypes.data)
        for room in self._rooms.values():
            if array.flags.c_contiguous and room.address <= begin < room.address + len(room.memory):
                return Array(room.number, begin - room.address, len(array), array.dtype.str)
        there = self.memory(array.nbytes).view(array.dtype)
        there[:] = array
        return self.place(there)

    def of(self, number: int) -> Room:
        """One of them."""
        return self._rooms[number]

    def _another(self, size: int) -> Room:
        fd = os.memfd_create("refitd-delta", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._last += 1
        memory = np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        self._rooms[self._last] = room = Room(self._last, fd, memory)
        return room
