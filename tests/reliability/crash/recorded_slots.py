"""The service's hand-back of a version, mirrored effect by effect in the model of a disk."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from disk_model import Disk

from refitd.reclaim import slots, trash
from refitd.root import handle

Cut = Callable[[int], None]


class MirroredOs:
    """The module `os` for the code that reclaims: what changes names or syncs them happens in the model as well."""

    def __init__(self, disk: Disk, before_each: Cut) -> None:
        self._disk = disk
        self._before_each = before_each
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _next(self) -> None:
        self.count += 1
        self._before_each(self.count)

    def mkdir(self, name: str, mode: int = 0o777, *, dir_fd: int) -> None:
        """See `os`."""
        self._next()
        os.mkdir(name, mode, dir_fd=dir_fd)
        self._disk.make_folder(_path(name, dir_fd))

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """See `os`."""
        self._next()
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._disk.rename(_path(old, src_dir_fd), _path(new, dst_dir_fd))

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """See `os`."""
        self._next()
        os.unlink(name, dir_fd=dir_fd)
        self._disk.remove(_path(name, dir_fd))

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        """See `os`."""
        self._next()
        os.rmdir(name, dir_fd=dir_fd)
        self._disk.remove(_path(name, dir_fd))

    def fsync(self, handle: int) -> None:
        """See `os`. Only folders are synced by reclaiming."""
        self._next()
        os.fsync(handle)
        self._disk.sync_folder(_here(handle))


@contextmanager
def mirrored_reclaim(disk: Disk, before_each: Cut, patch: pytest.MonkeyPatch) -> Generator[MirroredOs]:
    """Have every effect of reclaiming mirrored."""
    mirror = MirroredOs(disk, before_each)
    for module in (handle, slots, trash):
        patch.setattr(module, "os", mirror)
    try:
        yield mirror
    finally:
        patch.undo()


def _here(handle: int) -> str:
    return str(Path(f"/proc/self/fd/{handle}").readlink())


def _path(name: str, folder: int) -> str:
    return f"{_here(folder)}/{name}"
