"""Room for the next delta's file, taken from a tmpfs while the trainer makes its step.

To get pages from the kernel takes longer than to find what changed and to fill them. How many there will be is not
known before, but steps are alike: as many as the last delta took, and a quarter more. What is too much is given back
when the file gets its name, all of it when a full version goes out.

The file has no name until then (O_TMPFILE): when the process dies it is gone.
"""

import os
from pathlib import Path
from threading import Thread

from refitd_client import durable
from refitd_client.mapped import is_tmpfs

_LEAST = 8 * 2**20  # bytes for which it is worth the trouble


class Reserve:
    """At most one file in a folder. One caller at a time."""

    def __init__(self, folder: Path) -> None:
        """Nothing is taken before the size is known."""
        self._folder = folder
        self._expected = 0
        self._thread: Thread | None = None
        self._fd: int | None = None

    def expect(self, size: int) -> None:
        """The last file took so many bytes."""
        self._expected = size + size // 4

    def begin(self) -> None:
        """Take room, in a thread, unless there is some."""
        if self._expected >= _LEAST and self._thread is None and self._fd is None:
            self._thread = Thread(target=self._make, name="refitd-reserve")
            self._thread.start()

    def take(self) -> int | None:
        """The descriptor of a file with room, which is the caller's from here on. None where there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fd, self._fd = self._fd, None
        return fd

    def close(self) -> None:
        """Give it back."""
        if (fd := self.take()) is not None:
            os.close(fd)

    def _make(self) -> None:
        try:
            if not is_tmpfs(self._folder.stat().st_dev):
                return
            fd = durable.create_nameless(self._folder)
        except OSError:  # then the file is made when it is written, and says what is wrong
            return
        try:
            durable.reserve(fd, self._expected)
        except OSError:
            os.close(fd)
        else:
            self._fd = fd
