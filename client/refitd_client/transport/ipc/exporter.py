"""Whether the trainer that exports is still there: a lock that dies with it, and that others can query.

An offer of a process that died is void: its memory may belong to any process by now. A `flock` can only be queried by
taking it, so this is a lock of an open file description (fcntl(2), F_OFD_SETLK), on a file of its own.
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
# (set, query): of an open file description; some kernels (gVisor's) have only those of a process, which do as well
# where nothing else in the process opens the file.
_KINDS = ((fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK), (fcntl.F_SETLK, fcntl.F_GETLK))
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_HELD: dict[Path, int] = {}
_TURN = threading.Lock()


def begin(folder: Path) -> None:
    """Take the exporter's lock of a run's folder, which this process has locked. Does nothing the second time.

    Offers that a dead trainer has left there are emptied and unlinked first: our lock must not make them valid again.

    Raises:
        OSError: the files cannot be made, or the file system has no such locks.
    """
    with _TURN:
        if folder in _HELD:
            return
        for path in [*folder.glob(f"{OFFERS}*"), *folder.glob(f"{MAKING}*")]:
            if not path.is_symlink():
                os.truncate(path, 0)  # before it goes: an engine may have it open
            path.unlink()
        fd = open_plain(folder / NAME, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            _locked(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        _HELD[folder] = fd


def end(folder: Path) -> None:
    """Release the lock, if it is held: engines close what they have opened."""
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
    """Set the lock (0) or query it (1), of the first kind that the kernel has."""
    for last, kind in enumerate(_KINDS, 1):
        try:
            return fcntl.fcntl(fd, kind[what], _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            if error.errno != errno.EINVAL or last == len(_KINDS):
                raise
    raise AssertionError


def _forget_in_child() -> None:
    """Close the descriptors: a data loader's worker has copies, and would keep a dead trainer's lock."""
    while _HELD:
        os.close(_HELD.popitem()[1])


os.register_at_fork(after_in_child=_forget_in_child)
