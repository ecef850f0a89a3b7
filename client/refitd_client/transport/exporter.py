"""Whether the trainer that exports is still there: a lock that dies with it, and that others can query.

An offer of a process that died is void: its memory may belong to any process by now. Where several ranks of a trainer
lend, each holds a lock of its own, whose name is drawn when it begins: one that ends its lock and begins another one
does not make an offer valid again that was made before.

A `flock` can only be queried by taking it, so this is a lock of an open file description (fcntl(2), F_OFD_SETLK), on a
file of its own.
"""

import errno
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from refitd_client.files.plain_file import GET_FILE_LOCK, SET_FILE_LOCK, open_plain

NAME = ".lender.lock"
OFFERS = ".offer-"
MAKING = f".making{OFFERS}"
_OF_RANKS = ".lender-*.lock"  # `offered_parts.is_lock_name`
# (set, query): of an open file description; some kernels (gVisor's) have only those of a process, which do as well
# where nothing else in the process opens the file.
_LOCK_CALLS = ((SET_FILE_LOCK, GET_FILE_LOCK), (fcntl.F_SETLK, fcntl.F_GETLK))
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_HELD_FILES: dict[Path, int] = {}  # by the file
_TURN = threading.RLock()  # a signal handler or a finalizer may interrupt who holds it, and ask for it


def begin(folder: Path) -> None:
    """Take the exporter's lock of a run's folder, which this process has locked. Does nothing the second time.

    Offers that a dead trainer has left there are emptied and unlinked first: our lock must not make them valid again.
    Raises OSError: the files cannot be made, or the file system has no such locks.
    """
    with _TURN:
        if folder / NAME in _HELD_FILES:
            return
        for path in [*folder.glob(f"{OFFERS}*"), *folder.glob(f"{MAKING}*")]:
            if not path.is_symlink():
                os.truncate(path, 0)  # before it goes: an engine may have it open
            path.unlink()
        for path in folder.glob(_OF_RANKS):
            if not is_there(folder, [path.name]):  # of a rank that was killed
                path.unlink(missing_ok=True)
        _hold(folder / NAME)


def begin_rank(folder: Path) -> str:
    """Take a lock of this process's own beside that of the exporter, which is another rank. Returns its name. Raises
    OSError: as `begin`.
    """
    name = _OF_RANKS.replace("*", secrets.token_hex(8))
    with _TURN:
        try:
            _hold(folder / name)
        except BaseException:
            (folder / name).unlink(missing_ok=True)
            raise
    return name


def end(folder: Path) -> None:
    """Release the lock, if it is held: engines close what they have opened."""
    _release(folder / NAME)


def end_rank(folder: Path, name: str) -> None:
    """Release a lock from `begin_rank`, and remove it. What was offered under it is void."""
    _release(folder / name)
    with suppress(OSError):
        (folder / name).unlink()


def is_there(folder: Path, locks: Iterable[str] = (NAME,)) -> bool:
    """Whether processes export from a run's folder now: each of these locks is held."""
    return all(_is_held(folder / name) for name in locks)


def _hold(path: Path) -> None:
    fd = open_plain(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        _locked(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    _HELD_FILES[path] = fd


def _release(path: Path) -> None:
    with _TURN:
        fd = _HELD_FILES.pop(path, None)
    if fd is not None:
        os.close(fd)


def _is_held(path: Path) -> bool:
    try:
        fd = open_plain(path)
    except OSError:
        return False
    try:
        found = _locked(fd, 1)
    except OSError:
        return False
    finally:
        os.close(fd)
    return _FLOCK.unpack(found)[0] != fcntl.F_UNLCK


def _locked(fd: int, what: int) -> bytes:
    """Set the lock (0) or query it (1), of the first kind that the kernel has."""
    for last, kind in enumerate(_LOCK_CALLS, 1):
        try:
            return fcntl.fcntl(fd, kind[what], _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            if error.errno != errno.EINVAL or last == len(_LOCK_CALLS):
                raise
    raise AssertionError


def _forget_in_child() -> None:
    """Close the descriptors: a data loader's worker has copies, and would keep a dead trainer's lock."""
    while _HELD_FILES:
        os.close(_HELD_FILES.popitem()[1])


os.register_at_fork(after_in_child=_forget_in_child)
