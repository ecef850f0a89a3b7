"""Abandoned `.incoming-*` folders: what a publisher that died in the middle of a version left behind.

A living publisher holds a lock on `.lock` in its folder, and the kernel releases it when the process dies. So a folder
is abandoned when its lock can be taken. Where another host may hold that (on a network file system, unless the lock's
holder ran under this very kernel), the folder must be old as well; where there is no lock, very old. So must what a
pull
of this service has left, which goes on with it. Age is measured by the file system's own clock: the wall clock of this
machine may be a day off.

A look takes the lock for a moment. Publishers wait for that (`LOCK_PATIENCE`), and one whose folder was taken away
right before it had the lock makes another.
"""

import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from refitd.reclaim.trash import discard, room_of
from refitd.root.handle import below, identity_of, made, opened, parts_below
from refitd.root.scan import Discarded, Gone, Incoming, Refused
from refitd.text import spoken
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, STAGING_LOCK, pulled_into
from refitd_client.files.plain_file import LockState, open_plain, try_lock
from refitd_client.publish.run_folder import LOCK_NAME

OLD_SECONDS = 3600.0  # age at which an unlocked folder is abandoned that another host may be writing
WITHOUT_LOCK = 24  # a folder without a lock must be this many times as old
MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class _Content:
    """The newest modification time in a folder (seconds of the file system's clock), and the bytes of its files."""

    newest: float
    bytes: int

    def plus(self, other: "_Content") -> "_Content":
        return _Content(max(self.newest, other.newest), self.bytes + other.bytes)


def survey(root: int, runs: Sequence[str]) -> list[Incoming]:
    """All incoming folders of the runs and whether each is abandoned. Writes nothing but its own folder's time."""
    now = _now(root)
    return [found for run in sorted(runs) for found in _of_run(root, run, now)]


def is_published(root: int, run: str) -> bool:
    """Whether a publisher that is alive holds a run. Raises OSError."""
    try:
        with below(root, parts_below(run) or ("",)) as folder, _locked(folder, LOCK_NAME) as lock:
            return lock is LockState.HELD
    except FileNotFoundError:
        return False


def discard_abandoned(root: int, path: str) -> Discarded | Gone | Refused:
    """Look once more, and move the folder into the trash while holding its lock, so that no publisher takes it up."""
    now = _now(root)
    parts = parts_below(path)
    if parts is None or not parts[-1].startswith(INCOMING_PREFIX):
        return Refused(path, f"{path!r} is not the path of an incoming folder under the root")
    try:
        with below(root, parts) as folder, _locked(folder) as lock:
            found = _judge(path, _aged(lock, parts[-1]), _sum_up(folder, MAX_DEPTH), now)
            if not found.abandoned:
                return Refused(path, found.reason)
            return discard(root, path, identity_of(os.fstat(folder)))
    except FileNotFoundError:
        return Gone(path)
    except OSError as error:
        return Refused(path, f"{path} cannot be read: {error.strerror}")


def _of_run(root: int, run: str, now: float) -> Iterator[Incoming]:
    parts = parts_below(run)
    if parts is None:
        return
    try:
        with below(root, parts) as folder:
            names = sorted(name for name in os.listdir(folder) if name.startswith(INCOMING_PREFIX))
            for name in names:
                found = _look(folder, name, f"{run}/{name}", now)
                if found is not None:
                    yield found
    except FileNotFoundError:
        return
    except OSError as error:
        yield Incoming(path=run, abandoned=False, reason=f"the folder of the run cannot be read: {error.strerror}")


def _aged(lock: LockState, name: str) -> LockState:
    """What a pull has left it takes up again: only its age says that it is abandoned."""
    return LockState.FREE if lock is LockState.GONE and pulled_into(name) is not None else lock


def _look(parent: int, name: str, path: str, now: float) -> Incoming | None:
    try:
        with opened(name, parent) as folder, _locked(folder) as lock:
            return _judge(path, _aged(lock, name), _sum_up(folder, MAX_DEPTH), now)
    except FileNotFoundError:
        return None  # published or cleaned up just now
    except OSError as error:
        return Incoming(path=path, abandoned=False, reason=f"it cannot be read: {error.strerror}")


def _judge(path: str, lock: LockState, content: _Content, now: float) -> Incoming:
    age = now - content.newest
    limit = OLD_SECONDS * (WITHOUT_LOCK if lock is LockState.MISSING else 1)
    if lock is LockState.HELD:
        is_abandoned, reason = False, "its publisher is alive: it holds the lock"
    elif lock is LockState.GONE:
        is_abandoned, reason = True, f"abandoned: last written {spoken(age)} ago, and its publisher is gone"
    elif age <= limit:
        is_abandoned, reason = False, f"last written {spoken(age)} ago: it may be abandoned after {spoken(limit)}"
    else:
        without = "it has no lock" if lock is LockState.MISSING else "its lock is free"
        is_abandoned, reason = True, f"abandoned: last written {spoken(age)} ago, and {without}"
    return Incoming(path=path, abandoned=is_abandoned, reason=reason, age=age, bytes=content.bytes)


def _sum_up(folder: int, depth: int) -> _Content:
    if depth == 0:
        raise OSError(errno.ELOOP, f"its folders are nested deeper than {MAX_DEPTH}")
    found = _Content(os.fstat(folder).st_mtime, 0)
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found = found.plus(_Content(status.st_mtime, room_of(status)))
            if stat.S_ISDIR(status.st_mode):
                with opened(entry.name, folder) as inner:
                    found = found.plus(_sum_up(inner, depth - 1))
    return found


@contextmanager
def _locked(folder: int, name: str = STAGING_LOCK) -> Generator[LockState, None, None]:
    """Take the folder's lock if it is free, for as long as the context lasts."""
    try:
        handle = open_plain(name, within=folder)
    except FileNotFoundError:
        yield LockState.MISSING
        return
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)


def _now(root: int) -> float:
    """The time by the clock that stamps the root's files (on NFS, the server's). No file is made: disks get full."""
    with made(SERVICE_FOLDER, root, 0o755) as own:
        os.utime(own)
        return os.fstat(own).st_mtime
