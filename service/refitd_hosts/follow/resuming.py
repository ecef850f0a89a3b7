"""What stays on disk of a pull that a kill or a restart ends, so that the next pull of the version goes on with it.

    <root>/.refitd/pulls/<exp~trial>/v000123      the journal: a JSON value a line
        {"digest": "xxh3:…", "folder": ".incoming-…"}                       the manifest's digest; where the files lie
        ["model-00001-of-00004.safetensors", 17, "…32 hex digits…"]         a block that has arrived, and its digest

A line is written when its block is in the file, and no byte is believed for it: a pull that goes on digests such a
block again, and pulls it again where it has another digest. In the end each file must have the manifest's digest, as in
every pull. So nothing here has to be synced: what a power cut takes of files or journal is pulled again.

What a kill leaves, in order:

    the journal, no folder yet                          it is begun anew
    a folder with two names in the journal              it was about to be taken up: the one that is there counts
    a block without its line, or with half of it        it is pulled again, at most one for each part under way. A line
                                                        begins with a line break, so half of one spoils no other
    a manifest, no lock, no version yet                 neither is a file of the version: both are made again
    the version, and the journal                        no folder has the journal's name: it is removed

A version that is not wanted any more, or whose pull failed for good, loses folder and journal, in this order. A folder
whose journal is lost is collected as any abandoned publication's.
"""

import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import (
    PULLS,
    SERVICE_FOLDER,
    STAGING_LOCK,
    ShardLayout,
    is_staging,
    parse_version_folder,
    run_slots,
    version_folder,
    version_id,
)
from refitd_client.files import durable
from refitd_client.files.durable import STAT_BLOCK
from refitd_client.files.plain_file import LOCK_PATIENCE, FileLock, LockHeldError, open_plain, read_plain
from refitd_client.publish.run_folder import RunFolder

_MAX_JOURNAL_BYTES = 64 * 2**20


class PullJournal:
    """The journal of one version's pull. `known` has the digests of blocks that arrived before, by file and block."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """Touch nothing yet."""
        self._path = _journals(root, manifest.run) / version_folder(manifest.order)
        self._manifest = manifest
        self._fd: int | None = None
        self._turn = threading.Lock()
        self.known: dict[tuple[str, int], bytes] = {}

    def take(self, run: RunFolder, layout: Sequence[ShardLayout], target: Path) -> FileLock | None:
        """Begin to write into the folder `target`: make it of what an earlier pull left, else of a slot that fits.

        Returns its held lock; None where there is neither. Blocks.

        Raises:
            OSError: the journal cannot be written.
        """
        durable.make_folders(self._path.parent)
        folders, known = _read(self._path, self._manifest.digest)
        if folders and (lock := self._taken_up(run.path, folders, target)) is not None:
            self.known = known
            return lock
        for name in _read(self._path, None)[0]:
            _removed(run.path / name)
        with suppress(FileNotFoundError):
            durable.remove_file(self._path)
        self._fd = durable.create(self._path, 0o644)
        self._names(target)
        return run.take_slot(layout, target)

    def _taken_up(self, run: Path, folders: Sequence[str], target: Path) -> FileLock | None:
        for name in reversed(folders):
            folder = run / name
            try:
                lock = _locked(folder)
            except (OSError, LockHeldError):
                continue
            try:
                _clear(folder, {file: entry.size for file, entry in self._manifest.files.items()})
                self._fd = open_plain(self._path, os.O_RDWR | os.O_APPEND)
                self._names(target)  # before the rename: a kill in between leaves both names in the journal
                durable.rename(folder, target)
            except OSError:  # something else lies there: it is left to the collector
                lock.release()
                continue
            except BaseException:
                lock.release()
                raise
            return lock
        return None

    def _names(self, folder: Path) -> None:
        self._write({"digest": self._manifest.digest, "folder": folder.name})

    def add(self, file: str, block: int, digest: bytes) -> None:
        """Note that a block is in its file. Called in threads.

        Raises:
            OSError: the journal cannot be written.
        """
        self._write([file, block, digest.hex()])

    def _write(self, line: object) -> None:
        with self._turn:
            if self._fd is not None:
                durable.write(self._fd, b"\n" + msgspec.json.encode(line))

    def close(self) -> None:
        """Leave all as it is, for a later pull."""
        with self._turn:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def remove(self) -> None:
        """Close and remove it, after its folder has become a version or is gone."""
        self.close()
        with suppress(OSError):
            durable.remove_file(self._path)


def lacking(folder: Path, sizes: Mapping[str, int]) -> int:
    """The bytes that files of these sizes still need on the file system of the folder that they are written in."""
    there = 0
    for name, size in sizes.items():
        with suppress(OSError):
            there += min(size, (folder / name).lstat().st_blocks * STAT_BLOCK)
    return sum(sizes.values()) - there


def drop_others(root: Path, run: str, wanted: Collection[str]) -> tuple[list[str], list[str]]:
    """Remove what earlier pulls of a run left of versions that are not wanted any more. Blocks.

    Args:
        root: where the run's folder lies.
        run: its name.
        wanted: ids of versions.

    Returns:
        The ids of the versions of which all was removed, and of those of which something could not be removed now.
    """
    dropped: list[str] = []
    left: list[str] = []
    for journal, version in list(_of_run(root, run)):
        if version in wanted:
            continue
        try:
            is_gone = all(_removed(root / run / name) for name in _read(journal, None)[0])
            if is_gone:
                durable.remove_file(journal)
        except OSError:
            is_gone = False
        (dropped if is_gone else left).append(version)
    return dropped, left


def _journals(root: Path, run: str) -> Path:
    return root / SERVICE_FOLDER / PULLS / run_slots(run)


def _of_run(root: Path, run: str) -> Iterator[tuple[Path, str]]:
    folder = _journals(root, run)
    with suppress(OSError):
        for name in os.listdir(folder):
            order = parse_version_folder(name)
            if order is not None:
                yield folder / name, version_id(run, order)


def _read(journal: Path, digest: str | None) -> tuple[list[str], dict[tuple[str, int], bytes]]:
    """The folders and blocks that a journal names; none if it is of other contents than `digest` (None: of any)."""
    folders: list[str] = []
    known: dict[tuple[str, int], bytes] = {}
    try:
        lines = read_plain(journal, _MAX_JOURNAL_BYTES).split(b"\n")
    except OSError:
        return folders, known
    for line in lines:
        with suppress(msgspec.DecodeError, ValueError, TypeError, KeyError):  # half a line, or nothing of ours
            match msgspec.json.decode(line):
                case {"digest": str(of), "folder": str(name)} if digest in {None, of} and is_staging(name):
                    folders.append(name)
                case [str(file), int(block), str(text)] if len(text) == 32:
                    known[file, block] = bytes.fromhex(text)
                case _:
                    pass
    return folders, known


def _locked(folder: Path) -> FileLock:
    """The lock of a folder that a pull left, held. The folder is there: one that the collector takes goes under it.

    Raises:
        LockHeldError: another process writes into it, or the collector looks at it.
        OSError: it is gone, or is no folder.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    lock = FileLock(folder / STAGING_LOCK, patience=LOCK_PATIENCE)
    try:
        folder.lstat()
    except OSError:
        lock.release()
        raise
    return lock


def _clear(folder: Path, sizes: Mapping[str, int]) -> None:
    """Remove what is no file of these names and sizes that this user alone has written.

    Raises:
        OSError: something there cannot be removed, as a folder.
    """
    device = folder.lstat().st_dev
    for name in os.listdir(folder):
        status = (folder / name).lstat()
        fits = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_dev == device
        fits = fits and status.st_size == sizes.get(name) and os.access(folder / name, os.R_OK | os.W_OK)
        if name != STAGING_LOCK and not fits:
            durable.remove_file(folder / name)


def _removed(folder: Path) -> bool:
    """Remove a folder that a pull left; whether it is gone."""
    try:
        lock = _locked(folder)
    except FileNotFoundError:
        return True
    except (OSError, LockHeldError):
        return False
    try:
        durable.remove_folder(folder)
    except OSError:
        return False
    finally:
        lock.release()
    return True
