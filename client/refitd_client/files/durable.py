"""Everything that changes the file system, one function for each effect, so that a commit survives a power cut.

What makes a file durable is `sync` of the file *and* `sync_folder` of the folder that names it. A rename that
overtakes either leaves, after a power cut, a name without its data. The order is therefore always

    create → write → sync (each file) → sync_folder (its folder) → rename → sync_folder (the parent)

Crash tests stop the process at each of these functions in turn. Nothing else in the package changes a file, but for
locks, whose content does not matter.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Bytes(Protocol):
    """A file in memory: its content."""

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it."""
        ...


_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file, copy on write


def make_folder(path: Path) -> None:
    """Make one folder, with the permissions that the umask leaves.

    Raises:
        FileExistsError: it exists.
    """
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
    """Open a new file for writing and return its descriptor. Its mode is `mode` less what the umask takes.

    Raises:
        FileExistsError: there is something of that name, be it a dangling link.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_nameless(folder: Path) -> int:
    """Open a new file that is in no folder yet. If it never gets a name it goes with the descriptor.

    Raises:
        OSError: the file system has no such files, or anything else.
    """
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)


def give_name(fd: int, path: Path) -> None:
    """Put a nameless file into a folder.

    Raises:
        FileExistsError: there is something of that name.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # with a folder's descriptor, so that Python calls linkat(2), which follows the link in /proc
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def reserve(fd: int, size: int) -> None:
    """Have blocks for the first `size` bytes of a file, which has at least that size then; its content stays.

    Raises:
        OSError: the file system has not so much room.
    """
    os.posix_fallocate(fd, 0, size)


def write(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; the kernel may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at a place in a file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def overwrite(file: Bytes, data: NDArray[np.uint8], offset: int) -> None:
    """Write into a mapped file; it must have the room."""
    file.bytes[offset : offset + len(data)] = data


def touch_pages(file: Bytes) -> None:
    """Have a mapped file's pages in the table of the process. Its content does not matter any more then."""
    file.bytes[:: mmap.PAGESIZE] = 0


def touch(fd: int) -> None:
    """Give a file the time of now, as writing through a mapping does not do on a tmpfs: times tell of changes."""
    os.utime(fd)


def clone(source: int, target: int) -> bool:
    """Make `target` a copy of `source` that shares its blocks until either changes. False where that cannot be."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # other file system, or one without reflinks: each has its own error number
        return False
    return True


def sync(fd: int) -> None:
    """Have a file's bytes on stable storage when this returns."""
    os.fsync(fd)


def sync_folder(path: Path, handle: int | None = None) -> None:
    """Have a folder's names on stable storage when this returns. `handle` is on it, where it may go away meanwhile."""
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
    """Remove a name."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder that holds plain files, and them. Links in it are removed, never followed."""
    for entry in list(path.iterdir()):
        remove_file(entry)
    path.rmdir()


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a small file with these bytes, durable but for its folder."""
    fd = create(path, mode)
    try:
        write(fd, data)
        sync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, by: Path) -> None:
    """Have `path` hold the old bytes or the new at any moment. `by` is a free name on the same file system.

    Only its owner may write to the file, whatever the umask: others replace it, where they may write to the folder.
    """
    write_file(by, data, 0o644)
    rename(by, path)
    sync_folder(path.parent)


def resize(fd: int, size: int) -> None:
    """Give a new file its full size at once, so that several processes can write to places of it."""
    os.ftruncate(fd, size)
