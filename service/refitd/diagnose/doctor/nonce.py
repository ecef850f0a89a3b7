"""A random text in a file of the root, which comes and goes: whoever can say it sees the same files."""

import errno
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER

NONCE_NAME = "nonce"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHARED = "create it, give this user and the trainer's a common group, or name another with --root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonce:
    """A random text in a file beneath the root. Whoever can say the text sees the file."""

    path: str  # relative to the root
    text: str


class RootUnusableError(Exception):
    """The root cannot be probed; the message says why, `fix` what to do."""

    def __init__(self, message: str, fix: str = _SHARED) -> None:
        super().__init__(message)
        self.fix = fix


@contextmanager
def probed(root: Path) -> Generator[Nonce]:
    """A nonce on the root for as long as the context lasts.

    Raises:
        RootUnusableError: the root is no folder, or cannot be written.
    """
    if not root.is_dir():
        raise RootUnusableError(f"{root} is no folder")
    folder = root / SERVICE_FOLDER / f"doctor-{secrets.token_hex(8)}"
    nonce = Nonce(path=f"{SERVICE_FOLDER}/{folder.name}/{NONCE_NAME}", text=secrets.token_hex(16))
    is_new = not folder.parent.exists()
    try:
        try:
            folder.parent.mkdir(mode=0o770, exist_ok=True)
            folder.mkdir(mode=0o755)
            (folder / NONCE_NAME).write_text(nonce.text)
        except OSError as error:
            fix = "make room there" if error.errno in _NO_ROOM else _SHARED
            raise RootUnusableError(f"{folder.parent} cannot be written: {error.strerror}", fix) from error
        yield nonce
    finally:
        with suppress(OSError):
            (folder / NONCE_NAME).unlink()
        with suppress(OSError):
            folder.rmdir()
        if is_new:
            with suppress(OSError):  # somebody else has begun to use it
                folder.parent.rmdir()
