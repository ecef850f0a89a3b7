"""The file of an offer, and the lock on it, by which a trainer exports its tensors and gets them back.

    trainer    writes the file · … · empties and unlinks it, takes an exclusive flock: it has them back
    engine     reads the file; later, in its pause: takes a shared flock, sees that the file is not empty, reads the
               tensors, sees that the file is not empty yet and that the trainer lives, releases the lock

Once the exclusive lock is held no engine reads any more, and none can begin: an empty file is not an offer, also under
another name. A lock dies with its holder, so neither side waits for a process that is gone, and no service has to be
there. What was read of a trainer that died (`exporter`) is discarded.

A process that can read the secret of a root, `.refitd/handover.key`, may export memory to engines, and import it. The
service makes it; trainer and engines read it by their group. It is never in an environment or on a command line.
"""

import fcntl
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import NotPlainError, open_plain
from refitd_client.transport import exporter
from refitd_client.transport.offer import MAX_OFFER_BYTES, Offer, OfferRefusedError, seal, unseal

NAME = "handover.key"
BYTES = 32
_OFFER_MODE = 0o640


class HandoverKeyRefusedError(Exception):
    """The file cannot be a secret. The message names it and says what to do."""


def make_secret(root: Path) -> None:
    """Make a root's secret where there is none. It is durable before it has its name: no process reads a part of it.
    Raises OSError: it cannot be written.
    """
    folder = root / SERVICE_FOLDER
    if (folder / NAME).exists():
        return
    made = folder / f".{NAME}-{secrets.token_hex(8)}"
    fd = open_plain(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OFFER_MODE)
    try:
        os.fchmod(fd, _OFFER_MODE)  # whatever the umask
        os.write(fd, secrets.token_bytes(BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    with suppress(FileExistsError):
        os.link(made, folder / NAME)  # unlike a rename it does not replace one that another process has just made
    made.unlink()


def read_secret(root: Path) -> bytes:
    """Read the secret. Raises HandoverKeyRefusedError: it is no plain file, too short, or everyone may read it;
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


_LOCK_RETRY_SECONDS = 0.0005  # between the first two attempts to take the lock
_LONGEST_RETRY_SECONDS = 0.02


class ExportedTensors:
    """An offer that was made. Use it as a context manager, or call `take_back`."""

    def __init__(self, folder: Path, offer: Offer, secret: bytes) -> None:
        """Write it into a run's folder. Nothing is synced: an offer does not outlive its process. Raises OSError: it
        cannot be written.
        """
        exporter.begin(folder)
        self.path = folder / f"{exporter.OFFERS}{secrets.token_hex(8)}"
        made = folder / f".making{self.path.name}"
        self._fd: int | None = open_plain(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            view = memoryview(seal(offer, secret))
            while view:
                view = view[os.write(self._fd, view) :]
            made.rename(self.path)
        except BaseException:
            made.unlink(missing_ok=True)
            self._close()
            raise

    def take_back(self, within: float) -> bool:
        """Withdraw it, and wait until no engine reads: True, and the tensors are the trainer's own again.

        False when one still reads after `within` seconds: it copies, or hangs. Its copy fails the check of its
        fingerprints if the tensors change now, and it is restored. Harmless when it was taken back before.
        """
        if self._fd is None:
            return True
        os.ftruncate(self._fd, 0)  # a reader that holds the lock has read it: it only sees that it is withdrawn
        with suppress(FileNotFoundError):
            self.path.unlink()
        if not _lock_alone(self._fd, within):
            return False
        self._close()
        return True

    def __enter__(self) -> "ExportedTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back(0.0)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class ImportedTensors:
    """An offer that was opened. Its tensors may be read between `hold` and `release` only. Close it."""

    def __init__(self, path: Path, secret: bytes, known: Offer | None = None) -> None:
        """Read the offer, without a lock: the trainer does not wait for that. Raises OfferRefusedError: it was
        withdrawn, or is malformed; OSError: it is gone, or cannot be read.
        """
        self._folder = path.parent
        self._fd: int | None = None
        self._fd = open_plain(path)
        try:
            self.offer: Offer = unseal(_read_offer(self._fd, path.name), secret, known)
        except BaseException:
            self.close()
            raise

    @property
    def is_exported(self) -> bool:
        """Whether the trainer lives and has not withdrawn it. What was read while this is true is what was offered."""
        if self._fd is None or os.fstat(self._fd).st_size == 0:
            return False
        return exporter.is_there(self._folder, (exporter.NAME, *self.offer.layout.locks))

    def hold(self) -> None:
        """Take the lock. The trainer may wait for its end: `release` it soon. Raises OfferRefusedError: it was
        withdrawn.
        """
        if self._fd is None:
            raise OfferRefusedError("the offer is over")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OfferRefusedError("the offer was withdrawn") from None
        if not self.is_exported:  # emptied before the lock was there
            self.release()
            raise OfferRefusedError("the offer was withdrawn, or its trainer is gone")

    def release(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _read_offer(fd: int, name: str) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_OFFER_BYTES:
        raise OfferRefusedError(f"{name} is no offer: a plain file of at most {MAX_OFFER_BYTES} bytes is")
    data = bytearray()
    while len(data) < status.st_size and (part := os.read(fd, status.st_size - len(data))):
        data += part
    if not data or len(data) < status.st_size:
        raise OfferRefusedError("the offer was withdrawn")
    return bytes(data)


def _lock_alone(fd: int, within: float) -> bool:
    """Take the exclusive lock, by attempts for `within` seconds: a wait in the kernel has no deadline."""
    deadline, pause = time.monotonic() + within, _LOCK_RETRY_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
        else:
            return True
