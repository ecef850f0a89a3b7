"""One service owns a root and a state folder: the locks that say so, and what is checked at start.

The services of a group share a root: each has its lock as a reader has, so that no service alone takes it as well.
Which of them leads is settled in their database (`state/journal/leadership.py`).

The journal lives on a local disk, unless the operator names another folder for it.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from refitd.root.file_systems import file_system_of, wants_polling
from refitd_client.contract.naming import SERVICE_FOLDER, TRASH
from refitd_client.files.advice import with_advice
from refitd_client.files.plain_file import open_plain

VOLATILE = frozenset({"tmpfs", "ramfs"})


class StartRefusedError(Exception):
    """The service cannot start; the message says why and what to do."""


class Hold:
    """The lock of a root. It goes with the process, however it ends."""

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        """Lock it, `shared` with others of a group, or raise StartRefusedError or OSError."""
        self._path = root / SERVICE_FOLDER / "lock"
        self._what = f"owns {root}: stop it, or give this one a root of its own"
        self._shared = shared
        self._handle = self._lock_now()

    def _lock_now(self) -> int:
        return _locked(self._path, 0o660, self._what, shared=self._shared)

    def renew(self) -> str | None:
        """Lock what lies at the root's path now, if that is another file system than before; return why it cannot."""
        try:
            if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._handle)):
                return None
            handle = self._lock_now()
        except (OSError, StartRefusedError) as error:
            return f"the root cannot be locked: {error}"
        self.release()
        self._handle = handle
        return None

    def release(self) -> None:
        """Give it back."""
        os.close(self._handle)


@contextmanager
def owned(root: Path, *, shared: bool = False) -> Generator[Hold]:
    """Own `root` as long as the context lasts, alone or `shared` with the other services of a group.

    Raises:
        StartRefusedError: the root is no folder, cannot be written, or another service owns it.
    """
    if not root.is_dir():
        raise StartRefusedError(f"the root {root} is no folder: create it, or name another with --root")
    folder = root / SERVICE_FOLDER
    try:
        folder.mkdir(exist_ok=True, mode=0o770)
        hold = Hold(root, shared=shared)
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its folder in the root: {with_advice(error)}") from error
    with suppress(OSError):  # made while there is room: on a full disk it is what makes room
        (folder / TRASH).mkdir(exist_ok=True, mode=0o700)
    try:
        yield hold
    finally:
        hold.release()


@contextmanager
def state_owned(folder: Path) -> Generator[None]:
    """Own the state folder, too: two services of two roots would write into one journal.

    Raises:
        StartRefusedError: it cannot be made or written, or another service owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = _locked(folder / "lock", 0o600, f"keeps its journal in {folder}: name another folder with --state")
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its state folder: {with_advice(error)}") from error
    try:
        yield
    finally:
        os.close(handle)


def _locked(path: Path, mode: int, what: str, *, shared: bool = False) -> int:
    """A handle that holds the lock in a file; raises StartRefusedError where another process holds it, or OSError."""
    handle = open_plain(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        _lock(handle, what, shared=shared)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int, what: str, *, shared: bool) -> None:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
        raise StartRefusedError(f"another refitd (pid {owner}) {what}") from error
    with suppress(OSError):  # on a full disk the owner's pid cannot be written: the lock holds, and reclaim makes room
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)


def check_state_folder(folder: Path, *, named: bool, mounts: str) -> None:
    """Check that a journal in `folder` would be there after a reboot. `mounts` is the text of /proc/self/mounts.

    Raises:
        StartRefusedError: it is on a tmpfs or network file system and was not named by the operator.
    """
    kind = file_system_of(folder.resolve(), mounts)
    if named or kind == "overlay":  # a container's own file system: there is no better place to choose by default
        return
    if kind in VOLATILE:
        raise StartRefusedError(
            f"the state folder {folder} is on {kind} and gone after a reboot: name one with --state"
        )
    if wants_polling(kind):
        raise StartRefusedError(
            f"the state folder {folder} is on {kind}, where SQLite is unsafe: name one with --state"
        )
