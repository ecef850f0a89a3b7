"""A version that is being written: `.incoming-<unique>/`, which becomes `v000123` in one rename or goes away.

While it is written its `.lock` is held, so that a collector can tell it from one that a crash left behind. The lock
file goes right before the rename: a version holds nothing that its manifest does not name.

A crash before the rename leaves an `.incoming-*` with a free lock or none. A crash after it leaves the version,
whole: every byte of it was synced before it got its name.

The folder is a new one or a slot. In a slot the shards are there already, of the right length and with bytes that mean
nothing, and are written in place. Nothing else is in it, so every file of the finished version was written now.
"""

import logging
import os
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.naming import INCOMING_PREFIX, STAGING_LOCK
from refitd_client.errors import NoSpaceError
from refitd_client.files import durable
from refitd_client.files.lock import FileLock
from refitd_client.files.mapped import Mappings
from refitd_client.write.progress import Laps, Meter
from refitd_client.write.reserve import ReservedFile
from refitd_client.write.slots import open_shard
from refitd_client.write.staged_file import StagedFile, StagedShard

Take = Callable[[Path], FileLock | None]

_log = logging.getLogger("refitd_client")


class Staging:
    """The folder. `files` are the manifest's entries of the files that are complete and synced.

    `fingerprints` are those that were asked for, of the tensors in the files. `recycled` names the files that are there
    already, because the folder was a slot. `was_seen`: it had the version's name, if only for a moment.
    """

    def __init__(self, path: Path, meter: Meter, laps: Laps, mappings: Mappings | None = None) -> None:
        """Take over an empty folder, or a slot, whose lock is held.

        Args:
            path: the folder.
            meter: counts the bytes that are written.
            laps: counts the time that syncing and committing take.
            mappings: of recycled files.
        """
        self.path = path
        self.files: dict[str, ManifestFile] = {}
        self.fingerprints: dict[str, int] = {}
        self.meter = meter
        self.recycled: frozenset[str] = frozenset()
        self._laps = laps
        self._mappings = mappings
        self.was_seen = False
        self._target: Path | None = None
        self._open: dict[str, StagedShard] = {}

    @contextmanager
    def file(self, name: str, reserved: ReservedFile | None = None) -> Generator[StagedFile, None, None]:
        """Write one file of the version; it is synced at the end of the block.

        `reserved` is a file without a name (`Reserve`), which is taken over and gets this one.
        """
        fd = self._descriptor(name) if reserved is None else reserved.fd
        try:
            staged = StagedFile(fd, self.meter, reserved=reserved)
            yield staged
            if reserved is not None:
                durable.resize(fd, staged.entry().size)
                durable.give_name(fd, self.path / name)
            with self._laps.lap("sync"):
                durable.sync(fd)  # by the descriptor that wrote: another may not report a failed write-back
        finally:
            os.close(fd)
        self.files[name] = staged.entry()

    def open_shard(self, name: str) -> StagedShard:
        """Begin a file that is written in any order. It must be sealed, else the folder must be discarded."""
        fd = self._descriptor(name)
        self._open[name] = StagedShard(name, fd, None)
        if name in self.recycled and self._mappings is not None:
            self._open[name].mapped = self._mappings.of(fd)
        return self._open[name]

    def _descriptor(self, name: str) -> int:
        return open_shard(self.path / name) if name in self.recycled else durable.create(self.path / name)

    def seal(self, shard: StagedShard, size: int, digest: str) -> None:
        """Sync a file that is complete.

        Args:
            shard: the file.
            size: its bytes, for the manifest.
            digest: its digest, for the manifest.
        """
        with self._laps.lap("sync"):
            if shard.mapped is not None:
                durable.touch(shard.fd)
            durable.sync(shard.fd)  # of the mapping as well: its pages are the file's
        os.close(self._open.pop(shard.name).fd)
        self.files[shard.name] = ManifestFile(size=size, digest=digest)

    def close(self) -> None:
        """Close what was not sealed."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def require_space(self, needed: int) -> None:
        """Fail now if the version would fail later for want of space.

        Raises:
            NoSpaceError: the file system has fewer than `needed` bytes free.
        """
        free = free_bytes(self.path)
        if free < needed:
            raise no_space(self.path.parent, needed, free)

    def commit(self, manifest: bytes, manifest_name: str, target: Path) -> None:
        """Write the manifest, last, and give the version its name.

        Args:
            manifest: the content of the manifest.
            manifest_name: its file's name.
            target: the version's folder.

        Raises:
            OSError: `target` exists and is not an empty folder, or anything else; no version is visible then.
        """
        with self._laps.lap("sync"):
            durable.write_file(self.path / manifest_name, manifest)
            durable.remove_file(self.path / STAGING_LOCK)
            durable.sync_folder(self.path)
        with self._laps.lap("commit"):
            self._target = target
            durable.rename(self.path, target)
            self.was_seen = True
            durable.sync_folder(target.parent)

    def discard(self) -> None:
        """Take the name back if it was given, and remove everything. The collector removes what this cannot."""
        try:
            if self._target is not None and not self.path.exists():
                durable.rename(self._target, self.path)
            if self.path.exists():
                durable.remove_folder(self.path)
        except OSError as error:
            _log.warning("could not remove %s (%s); the service will, in time", self.path, error)


@contextmanager
def staged(
    folder: Path, meter: Meter, laps: Laps, *, take: Take | None = None, mappings: Mappings | None = None
) -> Generator[Staging, None, None]:
    """A new staging folder in a run's folder. It must be committed last in the block: any exception discards it.

    Args:
        folder: the run's folder.
        meter: counts the bytes that are written.
        laps: counts the time that syncing and committing take.
        take: makes a slot the staging folder and returns its lock, if it finds one that fits.
        mappings: of recycled files.
    """
    path = folder / f"{INCOMING_PREFIX}{uuid.uuid4().hex}"
    staging = Staging(path, meter, laps, mappings)
    lock: FileLock | None = None
    try:
        lock = take(path) if take is not None else None
        if lock is None:
            durable.make_folder(path)
            lock = FileLock(path / STAGING_LOCK)
        else:
            staging.recycled = frozenset(os.listdir(path)) - {STAGING_LOCK}
        yield staging
    except BaseException:  # an interrupted trainer, too, leaves nothing behind
        staging.close()
        staging.discard()
        raise
    finally:
        staging.close()
        if lock is not None:
            lock.release()


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def no_space(folder: Path, needed: int, free: int) -> NoSpaceError:
    """The error for a full file system.

    Args:
        folder: a folder in it.
        needed: bytes that the version needs.
        free: bytes that are free.
    """
    return NoSpaceError(
        f"the version needs {needed} bytes, and the file system of {folder} has {free} bytes free (or a quota is used "
        "up): free some, or let the service keep fewer versions",
        needed=needed,
        free=free,
    )
