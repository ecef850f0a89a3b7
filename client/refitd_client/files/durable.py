"""Everything that changes the file system, one function for each effect, so that a commit survives a power cut.

A file is durable after `sync` of the file *and* `sync_folder` of the folder that names it. A rename before either can
leave, after a power cut, a name without its data. The order is therefore always

    create → write → sync (each file) → sync_folder (its folder) → rename → sync_folder (the parent)

Crash tests stop the process at each of these functions in turn. Nothing else in the package changes a file, but for
locks, whose content does not matter.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.files import plain_file

STAT_BLOCK = 512  # bytes of a unit of st_blocks
_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file, copy on write


def make_folder(path: Path) -> None:
    """Make one folder, with the permissions that the umask allows. Raises FileExistsError if it exists."""
    path.mkdir()


def make_folders(path: Path) -> None:
    """Make a folder and those above it, each durable before the next is made in it."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        make_folder(path)
    except FileExistsError:  # another process was first; it is the same folder
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def create(path: Path, mode: int = 0o666) -> int:
    """Open a new file for writing and return its descriptor. Its mode is `mode` less what the umask takes. Raises
    FileExistsError if there is something of that name, be it a dangling link.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; the kernel may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def overwrite(file: "Mapped", data: NDArray[np.uint8], offset: int) -> None:
    """Write `data` into a mapped file, from byte `offset` on; the file must be long enough."""
    file.bytes[offset : offset + len(data)] = data


def touch(fd: int) -> None:
    """Set a file's times to now: on a tmpfs writing through a mapping does not, and changes are found by them."""
    os.utime(fd)


def clone(source: int, target: int) -> bool:
    """Make `target` a copy of `source` that shares its blocks until either changes. False if that is not possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # another file system, or one without reflinks: each has its own error number
        return False
    return True


def sync(fd: int) -> None:
    os.fsync(fd)


def sync_folder(path: Path, handle: int | None = None) -> None:
    """Write a folder's names to stable storage. `handle` is its descriptor, if the path may be gone."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if handle is None else handle
    try:
        os.fsync(fd)
    finally:
        if handle is None:
            os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name. POSIX lets a folder replace an empty folder only, a file any file."""
    old.rename(new)


def remove_file(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder that holds plain files, and them. Links in it are removed, never followed."""
    for entry in list(path.iterdir()):
        remove_file(entry)
    path.rmdir()


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a small file with the content `data`, durable but for its folder. `mode` is less what the umask takes."""
    fd = create(path, mode)
    try:
        write(fd, data)
        sync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, by: Path) -> None:
    """Replace the content of `path` by `data` in one step: at any moment it holds the old bytes or the new.

    Only its owner may write to the file, whatever the umask: others replace it, if they may write to the folder.

    `by` is a free name on the same file system.
    """
    write_file(by, data, 0o644)
    rename(by, path)
    sync_folder(path.parent)


def resize(fd: int, size: int) -> None:
    """Set a file's size, of a new one before it is written, so that several processes can write to it."""
    os.ftruncate(fd, size)


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
    """Files of versions that stay mapped in the trainer's process, to be written again when their slot is taken again.

    Mapping a file anew costs a page fault for each 4 KiB, registering it with the CUDA driver 80 ms a gigabyte; writing
    to one that is mapped costs a copy. A mapping goes with its inode: versions and slots change names all the time.

    A file that was deleted keeps its memory until it is unmapped: at the next publication, or when the publisher is
    closed.

    Only on tmpfs. On a disk's file system a page that is written through a mapping may need a block that is not there
    (SIGBUS), and one that a GPU has written would not be known to be dirty. And only files without holes: a hole has no
    pages, either.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], Mapped] = {}
        self._in_memory: dict[int, bool] = {}
        self._turn = threading.Lock()

    def of(self, fd: int) -> Mapped | None:
        """The mapping of an open file, a new one if need be; None if the file must not be written through one."""
        if not self.may_map(fd):
            return None
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        with self._turn:
            if key not in self._files:
                self._files[key] = Mapped(fd, status.st_size)
            return self._files[key]

    def may_map(self, fd: int) -> bool:
        """Whether an open file may be written through a mapping."""
        status = os.fstat(fd)
        is_whole = 0 < status.st_size <= status.st_blocks * STAT_BLOCK
        return is_whole and self._is_tmpfs(status.st_dev)

    def _is_tmpfs(self, device: int) -> bool:
        if device not in self._in_memory:
            self._in_memory[device] = plain_file.is_tmpfs(device)
        return self._in_memory[device]

    def prune(self) -> None:
        with self._turn:
            for key in [key for key, file in self._files.items() if file.is_gone]:
                self._files.pop(key).close()

    def close(self) -> None:
        with self._turn:
            while self._files:
                self._files.popitem()[1].close()
