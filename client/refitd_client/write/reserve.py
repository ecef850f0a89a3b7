"""Room for the next delta's file, taken from a tmpfs while the trainer makes its step.

To get pages from the kernel takes longer than to find what changed and to fill them. How many there will be is not
known before, but steps are alike: as many as the last delta took, and an eighth more. What is too much is given back
when the file gets its name, all of it when a full version goes out.

The file has no name until then (O_TMPFILE): when the process dies it is gone. It is mapped, with its pages in the
table, as a fault for each of them would take longer than to copy into it; the last one's mapping is undone in the same
thread, for the same reason.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from refitd_client.files import durable
from refitd_client.files.mapped import is_tmpfs

_LEAST = 8 * 2**20  # bytes for which it is worth the trouble


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A file with blocks, and its content in memory. The descriptor is its holder's to close."""

    fd: int
    bytes: NDArray[np.uint8]


def room_in(fd: int, size: int) -> Room:
    """Map the first `size` bytes of a file, for which there must be blocks: who writes to others is killed."""
    return Room(fd, np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), np.uint8))


class Reserve:
    """At most one file in a folder. One caller at a time."""

    def __init__(self, folder: Path) -> None:
        """Nothing is taken before the size is known."""
        self._folder = folder
        self._expected = 0
        self._thread: Thread | None = None
        self._room: Room | None = None
        self._used: Room | None = None

    def expect(self, size: int, used: Room | None) -> None:
        """The last file took so many bytes. The room that it was written to, if any, is not needed any more."""
        self._expected = size + size // 8
        self._used = used

    def begin(self) -> None:
        """Take room, in a thread, unless there is some."""
        if self._expected >= _LEAST and self._thread is None and self._room is None:
            self._thread = Thread(target=self._make, name="refitd-reserve")
            self._thread.start()

    def take(self) -> Room | None:
        """A file with room, which is the caller's from here on. None where there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        room, self._room = self._room, None
        return room

    def close(self) -> None:
        """Give it back."""
        if (room := self.take()) is not None:
            os.close(room.fd)
        self._used = None

    def _make(self) -> None:
        try:
            self._room = self._made()
        finally:
            self._used = None

    def _made(self) -> Room | None:
        try:
            if not is_tmpfs(self._folder.stat().st_dev):
                return None
            fd = durable.create_nameless(self._folder)
        except OSError:  # then the file is made when it is written, and says what is wrong
            return None
        try:
            durable.reserve(fd, self._expected)
            room = room_in(fd, self._expected)
            durable.touch_pages(room)
        except OSError:
            os.close(fd)
            return None
        return room
