"""Opening files in folders that others write to: the one place where it is done.

Any process that can write to a folder can put a FIFO, a socket, a device or a link where a file belongs. Opening a FIFO
waits for a writer, and a link leads anywhere. So nothing here waits, follows a link without being asked to, or opens
anything but a plain file. A test (`tests/unit/files/test_plain_file.py`) checks that nothing else opens files.

`fill` and `read_at` read all the bytes that were asked for: the kernel may return fewer, and a file may become shorter.

Locks (`FileLock`) are on such files, too. Python leaves out some calls of Linux where it was built against an older
libc than the one that it runs on. The Pythons that uv and conda install are such: they lack `os.memfd_create` (glibc
2.27), and `os.pidfd_open`, which depends on the kernel's headers. Constants are those of all machines that torch is
built for.
"""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.errors import InvalidWeightsError

GET_FILE_LOCK: int = getattr(fcntl, "F_OFD_GETLK", 36)
SET_FILE_LOCK: int = getattr(fcntl, "F_OFD_SETLK", 37)
"""Commands of fcntl(2): query and set a lock of an open file description."""

_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
_PIDFD_OPEN = 434  # of syscall(2), the same number on every machine


def memory_file(name: str) -> int:
    """Make a file without a place, in memory (memfd_create(2)), which /proc shows by this name. Returns its descriptor,
    which programs that are executed do not inherit. Raises OSError if there is no such memory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _CLOSE_ON_EXEC)
    return _called("memfd_create", name.encode(), _CLOSE_ON_EXEC)


def process_descriptor(pid: int) -> int:
    """Open a process, to see when it has ended (pidfd_open(2)). Programs that are executed do not inherit it. Raises
    OSError if it has ended; or the kernel has no such descriptors.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _called("syscall", _PIDFD_OPEN, pid, 0)


def _called(name: str, *arguments: bytes | int) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this libc has no {name}")
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    found = int(function(*values))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


_ALWAYS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotPlainError(OSError):
    """There is something of that name, and it is no plain file."""


def open_plain(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    within: int | None = None,
    follow: bool = False,
) -> int:
    """Open a plain file, and return its descriptor.

    `path` is a name in the folder `within`, if that descriptor is given. What keeps the opening from waiting is added
    to `flags`. Only what the operator or the caller's own user named may be a link (`follow`).

    Raises:
        NotPlainError: it is a FIFO, a socket, a device, a folder, or a link that is not to be followed.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | _ALWAYS | (0 if follow else os.O_NOFOLLOW), mode, dir_fd=within)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:  # a link, a FIFO or socket, a folder
            raise _not_plain(error.errno, path) from error
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise _not_plain(errno.EINVAL, path)


@contextmanager
def plain_file(path: str | os.PathLike[str], *, within: int | None = None, follow: bool = False) -> Generator[int]:
    """A descriptor for reading, for the length of the block. Arguments and errors are those of `open_plain`."""
    fd = open_plain(path, within=within, follow=follow)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Generator[int, None, None]:
    """A descriptor of a file of the trainer's, or of a link to one, for the length of the block. Raises
    InvalidWeightsError if it cannot be read, or is no plain file.
    """
    try:
        fd = open_plain(path, follow=True)
    except NotPlainError as error:
        raise InvalidWeightsError(f"{path} is not a plain file") from error
    except OSError as error:
        raise InvalidWeightsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def read_plain(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The first `most` bytes of a file, or all of it if it has fewer; links are followed with `follow`. Raises
    NotPlainError, OSError as `open_plain`.
    """
    with plain_file(path, follow=follow) as fd:
        return read_at(fd, min(most, os.fstat(fd).st_size), 0)


def open_folder(path: str | os.PathLike[str], *, within: int | None = None, follow: bool = False) -> int:
    """Open a folder, and return its descriptor. `within` and `follow` are as for `open_plain`.

    Raises:
        NotADirectoryError: it is no folder, or a link that is not to be followed.
        OSError: it cannot be opened.
    """
    return os.open(path, _AS_FOLDER | (0 if follow else os.O_NOFOLLOW), dir_fd=within)


def _not_plain(number: int, path: str | os.PathLike[str]) -> NotPlainError:
    return NotPlainError(number, "it is a link, a FIFO, a folder or a device, and not a plain file", os.fspath(path))


def fill(fd: int, data: memoryview, offset: int) -> None:
    """Read into all of `data` from byte `offset` of a file on. Raises OSError if the bytes cannot be read, or the file
    ends before.
    """
    filled = 0
    while filled < len(data):
        count = os.preadv(fd, [data[filled:]], offset + filled)
        if count == 0:
            raise _ended(offset + filled, offset + len(data))
        filled += count


def read_at(fd: int, length: int, offset: int) -> bytes:
    """The `length` bytes of a file from byte `offset` on; raises as `fill`."""
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise _ended(offset + len(data), offset + length)
        data += more
    return data


def hole_in(fd: int, begin: int) -> int | None:
    """Where the first hole of an open file is, from byte `begin` on; None where it has none, or nothing tells."""
    size = os.fstat(fd).st_size
    if begin >= size:
        return None
    try:
        found = os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError:  # a file system that knows no holes
        return None
    return found if found < size else None


def _ended(at: int, end: int) -> OSError:
    return OSError(f"the file ended at byte {at} while it was read up to {end}")


_HELD_LOCKS: "weakref.WeakSet[FileLock]" = weakref.WeakSet()
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
LOCK_PATIENCE = 5.0  # seconds for a lock that a collector alone may hold, while it looks whether the publisher is gone
_LOCK_LOOK_SECONDS = 0.005  # between two tries of a lock that is waited for


_LOCAL = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"})


def is_tmpfs(device: int) -> bool:
    """Whether a device number (`st_dev`) is a tmpfs's, by this process's mounts."""
    return _file_system(device) == "tmpfs"


def is_own(device: int) -> bool:
    """Whether a device number is that of a file system that this kernel alone writes: its locks are seen by all."""
    return _file_system(device) in _LOCAL


def _file_system(device: int) -> str | None:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    for line in text.splitlines():  # proc(5): 36 35 98:0 /root /mount options - type source options
        fields, _, rest = line.partition(" - ")
        if fields.split(" ", 3)[2] == wanted:
            return rest.partition(" ")[0]
    return None


@cache
def _boot() -> str:
    """What this boot of the kernel is called, "" where it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that a lock file names. `boot` is what its kernel called this boot of itself."""

    pid: int
    host: str
    boot: str = ""


class LockState(Enum):
    """What is known of a lock.

    GONE: it is free, and who held it is gone. FREE: it is free as far as this host sees; on a network file system
    another one may hold it. MISSING: there is none.
    """

    HELD = auto()
    GONE = auto()
    FREE = auto()
    MISSING = auto()


def try_lock(handle: int) -> LockState:
    """Take the lock of an open file if it is free, until the file is closed.

    A shared lock, because that needs no right to write, also on NFS; it keeps an exclusive one out as well.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockState.HELD
    except OSError as error:
        if error.errno in _UNSUPPORTED | {errno.EINVAL, errno.EBADF}:
            return LockState.MISSING  # the file system has no such locks
        raise
    holder = _holder_in(handle)
    is_seen = holder is not None and holder.boot != "" and holder.boot == _boot()
    return LockState.GONE if is_seen or is_own(os.fstat(handle).st_dev) else LockState.FREE


def _holder_in(handle: int) -> Holder | None:
    try:
        return from_json(os.pread(handle, 4096, 0), Holder)
    except msgspec.MsgspecError:  # it was just taken, and has not been written yet
        return None


class LockHeldError(Exception):
    """The lock at `path` is held; `holder` is the process that the file names, None if it names none."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        super().__init__(path, holder)
        self.path = path
        self.holder = holder


class FileLock:
    """A held lock on a file (`flock(2)`). Taken by construction, released by `release` or the end of the process.

    The file names the holder (`{"pid": 4711, "host": "node3"}`) for the error of a second process. Only the lock counts
    and never the file: a file that is not locked is free, whatever it says.

    A forked child (a data loader's worker) shares its parent's lock and would keep it beyond the parent's death. So
    children close their copies at once; the lock is free when its holder's copy, the last, is closed.
    """

    def __init__(self, path: Path, mode: int = 0o666, *, patience: float = 0.0) -> None:
        """Take it, and wait `patience` seconds for it. `mode` is the file's, less what the umask takes: users that may
        open the file may take the lock.

        Raises:
            LockHeldError: another process, or another part of this one, holds it.
            OSError: the file cannot be opened, or its file system has no locks.
        """
        self._fd: int | None = open_plain(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            excess = stat.S_IMODE(os.fstat(self._fd).st_mode) & ~mode
            if excess:  # the file was there before
                with suppress(PermissionError):  # another user's, who does the same
                    os.fchmod(self._fd, stat.S_IMODE(os.fstat(self._fd).st_mode) & mode)
            self._take(self._fd, path, time.monotonic() + patience)
        except BaseException:
            self.release()
            raise
        _HELD_LOCKS.add(self)

    @property
    def held(self) -> bool:
        return self._fd is not None

    def is_at(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), path.lstat())
        return False

    def release(self) -> None:
        """Release it. Harmless if it was released before."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _take(self, fd: int, path: Path, until: float) -> None:
        try:
            while not _is_taken(fd):
                if time.monotonic() >= until:
                    raise LockHeldError(path, _holder_in(fd))
                time.sleep(_LOCK_LOOK_SECONDS)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise OSError(
                error.errno, "this file system has no file locks (flock); mount it with them", str(path)
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(Holder(pid=os.getpid(), host=socket.gethostname(), boot=_boot())), 0)


def _is_taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_in_child() -> None:
    for lock in list(_HELD_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


def with_advice(error: OSError) -> str:
    """An error that a folder could not be made or written by, and what to do where that is known."""
    match error.errno:
        case errno.EROFS:
            todo = "its file system is mounted read-only: mount it to be written, or name another folder"
        case errno.EACCES | errno.EPERM:
            todo = (
                "this user may not write there: give the folder to a group that trainer and service share, and take "
                "away what locks it (chattr -i)"
            )
        case errno.EEXIST | errno.ENOTDIR:
            todo = "a file lies where the folder, or one above it, should be: name a folder"
        case _:
            return str(error)
    return f"{error}; {todo}"
