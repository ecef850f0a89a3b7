"""One service owns a root: the lock that says so, and the root's checks at start."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER


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
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its folder in the root: {error}") from error
    try:
        _lock(handle, root)
        yield folder
    finally:
        os.close(handle)


def _lock(handle: int, root: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
        raise StartRefusedError(
            f"another refitd (pid {owner}) owns {root}: stop it, or give this one a root of its own"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
