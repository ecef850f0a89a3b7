"""Whether the trainer that exports is still there: a lock that dies with it, and that others can ask about.

An offer of a process that died is void: its memory may be anybody's. To ask about a `flock` is to take it, so this is a
lock of an open file description (fcntl(2), F_OFD_SETLK), on a file of its own beside the offers.
"""

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

from refitd_client.files.plain_file import open_plain

NAME = ".lender.lock"
OFFERS = ".offer-"
MAKING = f".making{OFFERS}"
# (set, ask): of an open file description; some kernels (gVisor's) have only those of a process, which do as well
# where nobody else in the process opens the file.
_KINDS = ((fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK), (fcntl.F_SETLK, fcntl.F_GETLK))
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_HELD: dict[Path, int] = {}
_TURN = threading.Lock()


def begin(folder: Path) -> None:
    """Be the one who exports from a run's folder, which this process has locked. Does nothing the second time.

    What a trainer that died has left there is emptied and unlinked first: it must not become valid by our presence.

    Raises:
        OSError: the files cannot be made, or the file system has no such locks.
    """
    with _TURN:
        if folder in _HELD:
            return
        for path in [*folder.glob(f"{OFFERS}*"), *folder.glob(f"{MAKING}*")]:
            _void(path)
        fd = open_plain(folder / NAME, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            _locked(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        _HELD[folder] = fd


def end(folder: Path) -> None:
    """Export no more: engines give back what they hold open. Harmless where nothing was begun."""
    with _TURN:
        fd = _HELD.pop(folder, None)
    if fd is not None:
        os.close(fd)


def is_there(folder: Path) -> bool:
    """Whether a process exports from a run's folder now."""
    try:
        fd = open_plain(folder / NAME)
    except OSError:
        return False
    try:
        found = _locked(fd, 1)
    except OSError:
        return False
    finally:
        os.close(fd)
    return _LOCK.unpack(found)[0] != fcntl.F_UNLCK


def _locked(fd: int, what: int) -> bytes:
    """Set the lock, or ask about it, in the first way that there is."""
    for last, kind in enumerate(_KINDS, 1):
        try:
            return fcntl.fcntl(fd, kind[what], _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            if error.errno != errno.EINVAL or last == len(_KINDS):
                raise
    raise AssertionError


def _void(path: Path) -> None:
    """Empty it before it goes: an engine may have it open."""
    if not path.is_symlink():
        os.truncate(path, 0)
    path.unlink()


def _forget_in_child() -> None:
    """A data loader's worker has a copy of the descriptor, and would keep a dead trainer alive."""
    while _HELD:
        os.close(_HELD.popitem()[1])


os.register_at_fork(after_in_child=_forget_in_child)
