"""A lock on a file that lives as long as its holder: `flock(2)`, given back by the kernel when the process dies.

The file says who holds it (`{"pid": 4711, "host": "node3"}`) for the message of whoever comes second. It is the lock
that counts and never the file: a file without a holder is free, whatever it says.

A forked child (a data loader's worker) shares its parent's lock and would keep it beyond the parent's death. So
children close their copies at once; the lock is free when its holder's, the last, is closed.
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

_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who a lock file says holds it."""

    pid: int
    host: str


class LockHeldError(Exception):
    """Somebody else holds the lock; `holder` is who, as far as the file says."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        super().__init__(path, holder)
        self.holder = holder


class Lock:
    """A held lock. Taken by construction, given back by `release` or the end of the process."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Take it without waiting. `mode` is the file's, less what the umask takes: who may open it may take the lock.

        Raises:
            LockHeldError: another process, or another part of this one, holds it.
            OSError: the file cannot be opened, or its file system has no locks.
        """
        self._fd: int | None = open_plain(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            _narrow(self._fd, mode)
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
        """Give it back. Harmless when it was given back before."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _take(self, fd: int, path: Path) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeldError(path, _read_holder(fd)) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise OSError(
                error.errno, "this file system has no file locks (flock); mount it with them", str(path)
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(Holder(pid=os.getpid(), host=socket.gethostname())), 0)


def _narrow(fd: int, mode: int) -> None:
    """Take from a file that is there already what its mode has too much, where this process may."""
    if (now := stat.S_IMODE(os.fstat(fd).st_mode)) & ~mode:
        with suppress(PermissionError):  # another's, who does the same
            os.fchmod(fd, now & mode)


def _read_holder(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except msgspec.MsgspecError:  # it was just taken, and has not been written yet
        return None


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
