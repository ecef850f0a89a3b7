"""The making of copies, mirrored effect by effect in the model of a disk."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_model import Disk
from recorded_slots import MirroredOs

from refitd.reclaim import trash
from refitd.root import handle
from refitd_client.files import plain_file
from refitd_inside.materialize import disk, writing


class CopyingOs(MirroredOs):
    """Files are made, written and synced as well. What is read changes nothing."""

    def open(self, name: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """See `os`."""
        if dir_fd is None or not flags & os.O_CREAT:
            return os.open(name, flags, mode, dir_fd=dir_fd)
        self._next()
        is_new = not os.access(name, os.F_OK, dir_fd=dir_fd)
        opened = os.open(name, flags, mode, dir_fd=dir_fd)
        if is_new:
            self._disk.create(_here(opened))
        return opened

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """See `os`."""
        self._next()
        self._disk.write(_here(fd), offset, bytes(data))
        return os.pwrite(fd, data, offset)

    def fsync(self, handle: int) -> None:
        """See `os`."""
        if os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112
            super().fsync(handle)
            return
        self._next()
        os.fsync(handle)
        self._disk.sync(_here(handle))


@contextmanager
def mirrored_copies(
    model: Disk, before_each: Callable[[int], None], patch: pytest.MonkeyPatch
) -> Generator[MirroredOs]:
    """Have every effect of making copies mirrored; one thread writes, so that effects have an order."""
    mirror = CopyingOs(model, before_each)
    for module in (disk, writing, handle, trash, plain_file):
        patch.setattr(module, "os", mirror)
    patch.setattr(writing, "lanes_for", lambda _: 1)
    try:
        yield mirror
    finally:
        patch.undo()


def _here(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())
