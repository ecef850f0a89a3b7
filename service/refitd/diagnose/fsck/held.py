"""Whether a service runs on a root, found out without leaving a trace; and keeping one from starting meanwhile."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_plain


@contextmanager
def still(root: Path) -> Generator[str | None]:
    """Hold the root's lock where it is free, for as long as the context lasts. Gives who holds it, None if nobody does.

    Raises:
        OSError: the lock cannot be read.
    """
    try:
        handle = open_plain(root / SERVICE_FOLDER / "lock")
    except FileNotFoundError:
        yield None  # no service was ever here
        return
    try:
        yield _holder(handle)
    finally:
        os.close(handle)


def _holder(handle: int) -> str | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"pid {os.pread(handle, 64, 0).decode(errors='replace').strip() or 'unknown'}"
    return None
