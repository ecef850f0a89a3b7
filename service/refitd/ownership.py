"""One service owns a root and a state folder: the locks that say so, and the root's checks at start."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from refitd.reclaim.trash import TRASH
from refitd_client.contract.naming import SERVICE_FOLDER

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class StartRefusedError(Exception):
    """The service cannot start; the message says why and what to do."""


@contextmanager
def owned(root: Path) -> Generator[Path]:
    """Own `root` as long as the context lasts. The lock goes with the process, however it ends.

    Raises:
        StartRefusedError: the root is no folder, cannot be written, or another service owns it.
    """
    if not root.is_dir():
        raise StartRefusedError(f"the root {root} is no folder: create it, or name another with --root")
    folder = root / SERVICE_FOLDER
    try:
        folder.mkdir(exist_ok=True, mode=0o770)
        handle = os.open(folder / "lock", _LOCK_FLAGS, 0o660)
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its folder in the root: {error}") from error
    with suppress(OSError):  # made while there is room: on a full disk it is what makes room
        (folder / TRASH).mkdir(exist_ok=True, mode=0o700)
    try:
        _lock(handle, f"owns {root}: stop it, or give this one a root of its own")
        yield folder
    finally:
        os.close(handle)


@contextmanager
def state_owned(folder: Path) -> Generator[None]:
    """Own the state folder, too: two services of two roots would write into one journal.

    Raises:
        StartRefusedError: it cannot be made or written, or another service owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / "lock", _LOCK_FLAGS, 0o600)
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its state folder: {error}") from error
    try:
        _lock(handle, f"keeps its journal in {folder}: name another folder with --state")
        yield
    finally:
        os.close(handle)


def _lock(handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
        raise StartRefusedError(f"another refitd (pid {owner}) {what}") from error
    with suppress(OSError):  # on a full disk nobody can read who owns it: the lock holds, and collecting makes room
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
