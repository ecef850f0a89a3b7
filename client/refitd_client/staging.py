"""A version that is being written: `.incoming-<unique>/`, which becomes `v000123` in one rename or goes away.

While it is written its `.lock` is held, so that a collector can tell it from one that a crash left behind. The lock
file goes right before the rename: a version holds nothing that its manifest does not name.

A crash before the rename leaves an `.incoming-*` with a free lock or none. A crash after it leaves the version,
whole: every byte of it was synced before it got its name.
"""

import logging
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from refitd_client import durable
from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.naming import INCOMING_PREFIX
from refitd_client.errors import NoSpaceError
from refitd_client.lock import Lock
from refitd_client.progress import Laps, Meter

LOCK_NAME = ".lock"

_log = logging.getLogger("refitd_client")


class StagedFile:
    """A file of the version, digested as it is written."""

    def __init__(self, fd: int, meter: Meter) -> None:
        """Take over a new, empty file."""
        self.fd = fd
        self._meter = meter
        self._size = 0
        self._hasher = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        durable.write(self.fd, data)
        self.count(data)

    def count(self, data: bytes | memoryview) -> None:
        """Digest bytes that are in the file already, as those of a clone are."""
        self._hasher.update(data)
        self._size += len(data)
        self._meter.add(len(data))

    def entry(self) -> ManifestFile:
        """What the manifest says of it."""
        return ManifestFile(size=self._size, digest=f"xxh3:{self._hasher.hexdigest()}")


class Staging:
    """The folder. `files` are those that are complete and synced; `laps` counts what syncing takes."""

    def __init__(self, path: Path, meter: Meter, laps: Laps) -> None:
        """Take over an empty folder whose lock is held."""
        self.path = path
        self.files: dict[str, ManifestFile] = {}
        self._meter = meter
        self._laps = laps
        self._target: Path | None = None

    @contextmanager
    def file(self, name: str) -> Generator[StagedFile, None, None]:
        """Write one file of the version; it is synced at the end of the block."""
        fd = durable.create(self.path / name)
        try:
            staged = StagedFile(fd, self._meter)
            yield staged
            with self._laps.lap("sync"):
                durable.sync(fd)  # by the descriptor that wrote: another one may not hear of a failed write-back
        finally:
            os.close(fd)
        self.files[name] = staged.entry()

    def require_space(self, needed: int) -> None:
        """Refuse early what would fail late.

        Raises:
            NoSpaceError: the file system has fewer than `needed` bytes free.
        """
        free = free_bytes(self.path)
        if free < needed:
            raise no_space(self.path.parent, needed, free)

    def commit(self, manifest: bytes, manifest_name: str, target: Path) -> None:
        """Write the manifest, last, and give the version its name.

        Raises:
            OSError: `target` exists and is not an empty folder, or anything else; no version is visible then.
        """
        with self._laps.lap("sync"):
            durable.write_file(self.path / manifest_name, manifest)
            durable.remove_file(self.path / LOCK_NAME)
            durable.sync_folder(self.path)
        with self._laps.lap("commit"):
            self._target = target
            durable.rename(self.path, target)
            durable.sync_folder(target.parent)

    def discard(self) -> None:
        """Take the name back if it was given, and remove everything. Leaves the rest to a collector if it cannot."""
        try:
            if self._target is not None and not self.path.exists():
                durable.rename(self._target, self.path)
            if self.path.exists():
                durable.remove_folder(self.path)
        except OSError as error:
            _log.warning("could not remove %s (%s); the service will, in time", self.path, error)


@contextmanager
def staged(folder: Path, meter: Meter, laps: Laps) -> Generator[Staging, None, None]:
    """A new staging folder in a run's folder. It must be committed last: any exception discards it."""
    path = folder / f"{INCOMING_PREFIX}{uuid.uuid4().hex}"
    staging = Staging(path, meter, laps)
    lock: Lock | None = None
    try:
        durable.make_folder(path)
        lock = Lock(path / LOCK_NAME)
        yield staging
    except BaseException:  # an interrupted trainer, too, leaves nothing behind
        staging.discard()
        raise
    finally:
        if lock is not None:
            lock.release()


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def no_space(folder: Path, needed: int, free: int) -> NoSpaceError:
    """The error for a full file system."""
    return NoSpaceError(
        f"the version needs {needed} bytes, and the file system of {folder} has {free} bytes free (or a quota is used "
        "up): free some, or let the service keep fewer versions",
        needed=needed,
        free=free,
    )
