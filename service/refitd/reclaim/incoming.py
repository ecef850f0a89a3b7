"""Abandoned `.incoming-*` folders: what a publisher that died in the middle of a version left behind.

A living publisher holds a lock on `.lock` in its folder, and the kernel releases it when the process dies. So a folder
is abandoned when it is old *and* its lock is free; where there is no lock, or the file system has none, when it is very
old. Its age is measured by the file system's own clock: the time that it gives to a file touched now, less the newest
time in the folder. The wall clock of this machine may be a day off; both of these come from one clock.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from refitd.reclaim.seals import room_of
from refitd.reclaim.trash import discard
from refitd.root.handle import below, identity_of, made, opened, parts_below
from refitd.root.outcome import Discarded, Gone, Incoming, Refused
from refitd.text import spoken
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, STAGING_LOCK
from refitd_client.files.plain_file import open_plain

WITHOUT_LOCK = 24  # a folder without a lock must be this many times as old
MAX_DEPTH = 8


class PublisherLock(Enum):
    """What is known of a folder's lock."""

    UNTRIED = auto()
    HELD = auto()
    FREE = auto()
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class _Content:
    """The newest modification time in a folder (seconds of the file system's clock), and the bytes of its files."""

    newest: float
    bytes: int

    def plus(self, other: "_Content") -> "_Content":
        return _Content(max(self.newest, other.newest), self.bytes + other.bytes)


def survey(root: int, runs: Sequence[str], older_than: float) -> list[Incoming]:
    """All incoming folders of the runs and whether each is abandoned. Writes nothing but its own folder's time.

    Args:
        root: a handle on the root.
        runs: the names of the runs.
        older_than: seconds after which a folder whose lock is free is abandoned.

    Raises:
        OSError: the service's own folder in the root cannot be written.
    """
    now = _now(root)
    return [found for run in sorted(runs) for found in _of_run(root, run, older_than, now)]


def discard_abandoned(root: int, path: str, older_than: float) -> Discarded | Gone | Refused:
    """Look once more, and move the folder into the trash while holding its lock, so that no publisher takes it up.

    Args:
        root: a handle on the root.
        path: the folder's path beneath it.
        older_than: seconds after which a folder whose lock is free is abandoned.

    Raises:
        OSError: the service's own folder in the root cannot be written.
    """
    now = _now(root)
    parts = parts_below(path)
    if parts is None or not parts[-1].startswith(INCOMING_PREFIX):
        return Refused(path, f"{path!r} is not the path of an incoming folder under the root")
    try:
        with below(root, parts) as folder, _locked(folder) as lock:
            found = _judge(path, lock, _sum_up(folder, MAX_DEPTH), older_than, now)
            if not found.abandoned:
                return Refused(path, found.reason)
            return discard(root, path, identity_of(os.fstat(folder)))
    except FileNotFoundError:
        return Gone(path)
    except OSError as error:
        return Refused(path, f"{path} cannot be read: {error.strerror}")


def _of_run(root: int, run: str, older_than: float, now: float) -> Iterator[Incoming]:
    parts = parts_below(run)
    if parts is None:
        return
    try:
        with below(root, parts) as folder:
            names = sorted(name for name in os.listdir(folder) if name.startswith(INCOMING_PREFIX))
            for name in names:
                found = _look(folder, name, f"{run}/{name}", older_than, now)
                if found is not None:
                    yield found
    except FileNotFoundError:
        return
    except OSError as error:
        yield Incoming(path=run, abandoned=False, reason=f"the folder of the run cannot be read: {error.strerror}")


def _look(parent: int, name: str, path: str, older_than: float, now: float) -> Incoming | None:
    try:
        with opened(name, parent) as folder:
            content = _sum_up(folder, MAX_DEPTH)
            if now - content.newest <= older_than:
                # Even to try the lock would take it for a moment, and a publisher that starts just now would fail.
                return _judge(path, PublisherLock.UNTRIED, content, older_than, now)
            with _locked(folder) as lock:
                return _judge(path, lock, content, older_than, now)
    except FileNotFoundError:
        return None  # published or cleaned up just now
    except OSError as error:
        return Incoming(path=path, abandoned=False, reason=f"it cannot be read: {error.strerror}")


def _judge(path: str, lock: PublisherLock, content: _Content, older_than: float, now: float) -> Incoming:
    age = now - content.newest
    limit = older_than * WITHOUT_LOCK if lock is PublisherLock.MISSING else older_than
    if lock is PublisherLock.HELD:
        is_abandoned, reason = False, "its publisher is alive: it holds the lock"
    elif age <= limit:
        is_abandoned, reason = False, f"last written {spoken(age)} ago: it may be abandoned after {spoken(limit)}"
    else:
        without = "it has no lock" if lock is PublisherLock.MISSING else "its lock is free"
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
def _locked(folder: int) -> Generator[PublisherLock, None, None]:
    """Take the folder's lock if it is free, for as long as the context lasts.

    A shared lock, because that needs no right to write, also on NFS; it keeps a publisher's exclusive one out as well.
    """
    try:
        handle = open_plain(STAGING_LOCK, within=folder)
    except FileNotFoundError:
        yield PublisherLock.MISSING
        return
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> PublisherLock:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return PublisherLock.HELD
    except OSError as error:
        if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}:
            return PublisherLock.MISSING  # the file system has no such locks, so no publisher can hold one
        raise
    return PublisherLock.FREE


def _now(root: int) -> float:
    """The time by the clock that stamps the root's files (on NFS, the server's). No file is made: disks get full."""
    with made(SERVICE_FOLDER, root, 0o755) as own:
        os.utime(own)
        return os.fstat(own).st_mtime
