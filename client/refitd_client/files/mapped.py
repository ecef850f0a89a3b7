"""Files of versions that stay mapped in the trainer's process, to be written again when their slot is taken again.

Mapping a file anew costs a page fault for each 4 KiB, registering it with the CUDA driver 80 ms a gigabyte; writing to
one that is mapped costs a copy. A mapping goes with its inode: versions and slots change names all the time.

A file that was deleted keeps its memory until it is unmapped: at the next publication, or when the publisher is closed.

Only on tmpfs. On a disk's file system a page that is written through a mapping may need a block that is not there
(SIGBUS), and one that a GPU has written would not be known to be dirty. And only files without holes: a hole has no
pages, either.
"""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512  # bytes of a unit of st_blocks


class Mapped:
    """One file in memory: `bytes` are its content, at `address`. `tensor` is the same for torch, once registered."""

    def __init__(self, fd: int, size: int) -> None:
        """Map a file that is open for reading and writing; `fd` stays the caller's."""
        self.fd = os.dup(fd)  # keeps the inode's number from being given to another file
        try:
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.tensor: Any = None
        self._unregister: Callable[[], None] | None = None
        self._was_tried = False

    def register(self, how: Callable[[Any], tuple[Any, Callable[[], None]] | None]) -> bool:
        """Register the mapping with a driver; whether it is registered. `how` is called once.

        It returns a tensor over the mapping and what undoes it, or None if the driver will not.
        """
        if not self._was_tried:
            self._was_tried = True
            if (done := how(self._map)) is not None:
                self.tensor, self._unregister = done
        return self.tensor is not None

    @property
    def is_gone(self) -> bool:
        """Whether the file has no name any more: it is never written again, and only this mapping keeps its memory."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Unregister and unmap."""
        if self._unregister is not None:
            self._unregister()
        self.tensor = self._unregister = None
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # an array still refers to it; it is unmapped when that is freed
            del self._map
        os.close(self.fd)


class Mappings:
    """All files that a publisher has mapped."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], Mapped] = {}
        self._in_memory: dict[int, bool] = {}
        self._turn = threading.Lock()

    def of(self, fd: int) -> Mapped | None:
        """The mapping of an open file, a new one if need be; None if the file must not be written through one."""
        status = os.fstat(fd)
        if status.st_size == 0 or status.st_blocks * _BLOCK < status.st_size or not self._is_tmpfs(status.st_dev):
            return None
        key = status.st_dev, status.st_ino
        with self._turn:
            if key not in self._files:
                self._files[key] = Mapped(fd, status.st_size)
            return self._files[key]

    def _is_tmpfs(self, device: int) -> bool:
        if device not in self._in_memory:
            self._in_memory[device] = is_tmpfs(device)
        return self._in_memory[device]

    def prune(self) -> None:
        """Unmap files that were deleted."""
        with self._turn:
            for key in [key for key, file in self._files.items() if file.is_gone]:
                self._files.pop(key).close()

    def close(self) -> None:
        """Unmap all."""
        with self._turn:
            while self._files:
                self._files.popitem()[1].close()


def is_tmpfs(device: int) -> bool:
    """Whether a device number (`st_dev`) is a tmpfs's, by this process's mounts."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    for line in text.splitlines():  # proc(5): 36 35 98:0 /root /mount options - type source options
        fields, _, rest = line.partition(" - ")
        if fields.split(" ", 3)[2] == wanted:
            return rest.startswith("tmpfs ")
    return False
