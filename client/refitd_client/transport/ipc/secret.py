"""The secret of a root, `.refitd/handover.key`: a process that can read it may export memory to engines, and import it.

The service makes it; trainer and engines read it by their group. It is never in an environment or on a command line.
"""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import NotPlainError, open_plain

NAME = "handover.key"
BYTES = 32
_MODE = 0o640


class HandoverKeyRefusedError(Exception):
    """The file cannot be a secret. The message names it and says what to do."""


def make_secret(root: Path) -> None:
    """Make it where there is none. It is durable before it has its name, so that no process reads a part of it.

    Raises:
        OSError: it cannot be written.
    """
    folder = root / SERVICE_FOLDER
    if (folder / NAME).exists():
        return
    made = folder / f".{NAME}-{secrets.token_hex(8)}"
    fd = open_plain(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        os.fchmod(fd, _MODE)  # whatever the umask
        os.write(fd, secrets.token_bytes(BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    with suppress(FileExistsError):
        os.link(made, folder / NAME)  # unlike a rename it does not replace one that another process has just made
    made.unlink()


def read_secret(root: Path) -> bytes:
    """Read the secret.

    Raises:
        HandoverKeyRefusedError: it is no plain file, too short, or everyone may read it.
        OSError: there is none (FileNotFoundError: does a service run on this root?), or it may not be read.
    """
    path = root / SERVICE_FOLDER / NAME
    try:
        fd = open_plain(path)
    except NotPlainError as error:
        raise HandoverKeyRefusedError(f"{path} is no plain file: remove it, and start the service again") from error
    try:
        status = os.fstat(fd)
        if status.st_mode & stat.S_IRWXO:
            raise HandoverKeyRefusedError(f"everyone may read {path}: chmod o= it, or remove it for a new one")
        secret = os.read(fd, BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != BYTES:
        raise HandoverKeyRefusedError(f"{path} has not {BYTES} bytes: remove it, and start the service again")
    return secret
