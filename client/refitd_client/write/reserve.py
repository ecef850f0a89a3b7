"""A file with pages for the next delta, taken from a tmpfs while the trainer makes its step.

To get pages from the kernel takes longer than to find what changed and to fill them. How many are needed is not known
before, but steps are alike: as many as the last delta took, and an eighth more. The rest is given back when the file
gets its name, all of it when a full version goes out.

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
class ReservedFile:
    """A file with blocks, and its content in memory. The caller that takes it closes the descriptor."""

    fd: int
    bytes: NDArray[np.uint8]


def map_reserved(fd: int, size: int) -> ReservedFile:
    """Map the first `size` bytes of a file, which must have blocks: writing to a page without one kills the process."""
    return ReservedFile(fd, np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), np.uint8))


class Reserve:
    """At most one reserved file in a folder. One caller at a time."""

    def __init__(self, folder: Path) -> None:
        """Reserve nothing before the size is known."""
        self._folder = folder
        self._expected = 0
        self._thread: Thread | None = None
        self._file: ReservedFile | None = None
        self._used: ReservedFile | None = None

    def expect(self, size: int, used: ReservedFile | None) -> None:
        """Note the bytes of the last delta. The file that it was written to, if any, is not needed any more."""
        self._expected = size + size // 8
        self._used = used

    def begin(self) -> None:
        """Reserve a file, in a thread, unless there is one."""
        if self._expected >= _LEAST and self._thread is None and self._file is None:
            self._thread = Thread(target=self._make, name="refitd-reserve")
            self._thread.start()

    def take(self) -> ReservedFile | None:
        """The reserved file, which is the caller's from here on. None if there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        taken, self._file = self._file, None
        return taken

    def close(self) -> None:
        """Give the file back."""
        if (taken := self.take()) is not None:
            os.close(taken.fd)
        self._used = None

    def _make(self) -> None:
        try:
            if not is_tmpfs(self._folder.stat().st_dev):
                return
            fd = durable.create_nameless(self._folder)
            try:
                durable.reserve(fd, self._expected)
                made = map_reserved(fd, self._expected)
                durable.touch_pages(made)
                self._file = made
            except BaseException:
                os.close(fd)
                raise
        except OSError:  # then the file is made when it is written, and that says what is wrong
            pass
        finally:
            self._used = None
