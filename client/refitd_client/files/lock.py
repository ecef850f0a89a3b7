"""A lock on a file that lives as long as its holder: `flock(2)`, released by the kernel when the process dies.

The file names the holder (`{"pid": 4711, "host": "node3"}`) for the error of a second process. Only the lock counts and
never the file: a file that is not locked is free, whatever it says.

A forked child (a data loader's worker) shares its parent's lock and would keep it beyond the parent's death. So
children close their copies at once; the lock is free when its holder's copy, the last, is closed.
"""

import errno
import fcntl
import os
import socket
import stat
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refitd_client.files.plain_file import open_plain

_HELD: "weakref.WeakSet[FileLock]" = weakref.WeakSet()
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str


class LockHeldError(Exception):
    """The lock is held; `holder` is the process that the file names, None if it names none."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        super().__init__(path, holder)
        self.holder = holder


class FileLock:
    """A held lock. Taken by construction, released by `release` or the end of the process."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Take it without waiting. `mode` is the file's, less what the umask takes: users that may open the file may
        take the lock.

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
            self._take(self._fd, path)
        except BaseException:
            self.release()
            raise
        _HELD.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._fd is not None

    def release(self) -> None:
        """Release it. Harmless if it was released before."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _take(self, fd: int, path: Path) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                holder = msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
            except msgspec.MsgspecError:  # it was just taken, and has not been written yet
                holder = None
            raise LockHeldError(path, holder) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise OSError(
                error.errno, "this file system has no file locks (flock); mount it with them", str(path)
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(Holder(pid=os.getpid(), host=socket.gethostname())), 0)


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
