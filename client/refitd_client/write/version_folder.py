"""A version that is being written: `.incoming-<unique>/`, which becomes `v000123` in one rename or goes away.

While it is written its `.lock` is held, so that a collector can tell it from one that a crash left behind. The lock
file goes right before the rename: a version holds nothing that its manifest does not name.

A crash before the rename leaves an `.incoming-*` with a free lock or none. A crash after it leaves the version,
whole: every byte of it was synced before it got its name.

The folder is a new one or a slot. In a slot the shards are there already, of the right length and with bytes that mean
nothing, and are written in place. Nothing else is in it, so every file of the finished version was written now.

Shards are written in any order and by any thread (`StagedShard`), other files from begin to end (`StagedFile`).
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refitd_client.contract.manifest import FileDigest, ManifestFile
from refitd_client.contract.naming import INCOMING_PREFIX, STAGING_LOCK
from refitd_client.errors import InvalidWeightsError, NoSpaceError
from refitd_client.files import durable
from refitd_client.files.durable import Mapped, Mappings
from refitd_client.files.plain_file import LOCK_PATIENCE, FileLock, open_plain, opened

Take = Callable[[Path], FileLock | None]

_COPIED = 2**20  # bytes that are copied at a time

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Bytes of the version's files that were written so far, and how many there will be."""

    written: int
    total: int


class Meter:
    """Adds up bytes from any thread, and reports them as they grow in the one that made it."""

    def __init__(
        self, total: int, callback: Callable[[Progress], None] | None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Nothing is counted yet.

        `callback` is called in this thread, about once a megabyte if it is this thread that writes. `check` raises if
        nothing more is to be written; it is called with each count, in any thread.
        """
        self.total = total
        self._written = 0
        self._reported = 0
        self._callback = callback
        self.check = check
        self._thread = threading.get_ident()
        self._turn = threading.Lock()

    @property
    def is_watched(self) -> bool:
        return self._callback is not None

    def add(self, count: int) -> None:
        self.check()
        if self._callback is not None:
            with self._turn:
                self._written += count
            self.report()

    def report(self) -> None:
        """Report what was counted since the last time, if this is the thread for it."""
        if self._callback is None or self._written == self._reported or threading.get_ident() != self._thread:
            return
        self._reported = self._written
        self._callback(Progress(written=self._reported, total=self.total))


class Laps:
    """Milliseconds by name. Laps of the same name add up."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.times: dict[str, float] = {}
        self._turn = threading.Lock()

    @property
    def since_begin(self) -> float:
        """Milliseconds since this was made: laps of several threads add up to more."""
        return (time.perf_counter() - self._began) * 1000

    @contextmanager
    def lap(self, name: str) -> Generator[None, None, None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = (time.perf_counter() - began) * 1000
            with self._turn:
                self.times[name] = self.times.get(name, 0.0) + took


class StagedShard:
    """A file that is written in any order, by any thread, and digested by the thread that seals it.

    `mapped` is the file in memory if it is recycled and may be written that way.
    """

    def __init__(self, name: str, fd: int, mapped: Mapped | None) -> None:
        self.name = name
        self.fd = fd
        self.mapped = mapped

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        if self.mapped is None:
            durable.write_at(self.fd, data.data, offset)
        else:
            durable.overwrite(self.mapped, data, offset)

    def get(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Read back `count` bytes from byte `offset` on. Raises OSError if the file has become shorter."""
        if self.mapped is not None:
            return self.mapped.bytes[offset : offset + count]
        data = np.frombuffer(os.pread(self.fd, count, offset), np.uint8)
        if len(data) < count:
            raise OSError(f"{self.name} became shorter while it was read back")
        return data


class StagedFile:
    """A file that is written from begin to end, and digested meanwhile."""

    def __init__(self, fd: int, meter: Meter) -> None:
        self.fd = fd
        self._meter = meter
        self._size = 0
        self._digest = FileDigest()

    def write(self, data: bytes | memoryview) -> None:
        durable.write(self.fd, data)
        self.count(data)

    def begin_with(self, digests: Sequence[bytes], size: int) -> None:
        """Count the file's first `size` bytes, written by others, by the digests of their blocks of `digest.BLOCK`."""
        self._digest.begin_with(digests)
        self._size += size
        self._meter.add(size)

    def count(self, data: bytes | memoryview) -> None:
        """Digest bytes that are in the file already, as those of a clone are."""
        self._digest.update(data)
        self._size += len(data)
        self._meter.add(len(data))

    @property
    def digest(self) -> bytes:
        return self._digest.digest

    def entry(self) -> ManifestFile:
        return ManifestFile(size=self._size, digest=self._digest.text)


class Staging:
    """The folder. `files` are the manifest's entries of the files that are complete and synced.

    `fingerprints` are those that were asked for, of the tensors in the files. `recycled` names the files that are there
    already, because the folder was a slot. `was_seen`: it had the version's name, if only for a moment.
    """

    def __init__(self, path: Path, meter: Meter, laps: Laps, mappings: Mappings | None = None) -> None:
        """Take over an empty folder, or a slot, whose lock is held."""
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
    def file(self, name: str) -> Generator[StagedFile, None, None]:
        """Write one file of the version; it is synced at the end of the block."""
        fd = self._descriptor(name)
        try:
            staged = StagedFile(fd, self.meter)
            yield staged
            with self._laps.lap("sync"):
                durable.sync(fd)  # by the descriptor that wrote: another may not report a failed write-back
        finally:
            os.close(fd)
        self.files[name] = staged.entry()

    def copy(self, path: Path) -> None:
        """Copy a file into the version under its own name, and see that it was not written to meanwhile.

        It is cloned where the file system shares blocks (reflinks: XFS, Btrfs), and never hard-linked.

        Raises:
            InvalidWeightsError: it was, or it is no plain file, or cannot be read.
            NoSpaceError: there is no room for it.
        """
        with opened(path) as source:
            before = os.fstat(source)
            with self.file(path.name) as file:
                is_clone = durable.clone(source, file.fd)
                if not is_clone and not self.recycled:
                    self.require_space(before.st_size)
                add, origin = (file.count, file.fd) if is_clone else (file.write, source)
                while chunk := os.read(origin, _COPIED):  # a clone is read itself: its digest is of what is published
                    add(chunk)
            after = os.fstat(source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InvalidWeightsError(f"{path} was written to while it was copied: publish after the save has returned")

    def open_shard(self, name: str) -> StagedShard:
        """Begin a file that is written in any order. It must be sealed, else the folder must be discarded."""
        fd = self._descriptor(name)
        self._open[name] = StagedShard(name, fd, None)
        if name in self.recycled and self._mappings is not None:
            self._open[name].mapped = self._mappings.of(fd)
        return self._open[name]

    def _descriptor(self, name: str) -> int:
        return open_recycled(self.path / name) if name in self.recycled else durable.create(self.path / name)

    def seal(self, shard: StagedShard, size: int, digest: str) -> None:
        """Sync a file that is complete. `size` and `digest` are for the manifest."""
        with self._laps.lap("sync"):
            if shard.mapped is not None:
                durable.touch(shard.fd)
            durable.sync(shard.fd)  # of the mapping as well: its pages are the file's
        os.close(self._open.pop(shard.name).fd)
        self.files[shard.name] = ManifestFile(size=size, digest=digest)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def require_space(self, needed: int) -> None:
        """Fail now if the version would fail later for want of space. Raises NoSpaceError if the file system has fewer
        than `needed` bytes free.
        """
        free = free_bytes(self.path)
        if free < needed:
            raise no_space(self.path.parent, needed, free)

    def commit(self, manifest: bytes, manifest_name: str, target: Path) -> None:
        """Write the manifest, last, and give the version its name. Raises OSError if `target` exists and is not an
        empty folder, or anything else; no version is visible then.
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
            _log.warning(
                "%s could not be removed (%s): it is no version, nothing reads it, and it takes room. Delete it, or "
                "the run's next publisher or the service of this root does",
                self.path,
                error,
            )


@contextmanager
def staged(
    folder: Path,
    meter: Meter,
    laps: Laps,
    *,
    take: Take | None = None,
    mappings: Mappings | None = None,
    name: str | None = None,
) -> Generator[Staging, None, None]:
    """A staging folder in a run's folder, new unless it has a name that is known. It must be committed last in the
    block: any exception discards it.

    `take` makes a slot the staging folder and returns its lock, if it finds one that fits.
    """
    path = folder / (name or f"{INCOMING_PREFIX}{uuid.uuid4().hex}")
    staging = Staging(path, meter, laps, mappings)
    lock: FileLock | None = None
    try:
        lock = take(path) if take is not None else None
        if lock is None:
            lock = _begun(path)
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


def _begun(path: Path) -> FileLock:
    """Make a staging folder, and return its held lock.

    A collector that looks holds the lock for a moment, and takes for dead what is not locked yet.
    """
    while True:
        with suppress(FileExistsError):
            durable.make_folder(path)
        with suppress(FileNotFoundError):
            lock = FileLock(path / STAGING_LOCK, patience=LOCK_PATIENCE)
            if lock.is_at(path / STAGING_LOCK):
                return lock
            lock.release()


def open_recycled(path: Path) -> int:
    """A descriptor of a file of a slot, to write it anew. It is never truncated."""
    return open_plain(path, os.O_RDWR)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def no_space(folder: Path, needed: int, free: int) -> NoSpaceError:
    """The error for a full file system, in which `folder` lies."""
    return NoSpaceError(
        f"the version needs {needed} bytes, and the file system of {folder} has {free} bytes free (or a quota is used "
        "up): free some, or let the service keep fewer versions",
        needed=needed,
        free=free,
    )
