"""What stays on disk of a pull that a kill or a restart ends, so that the next pull of the version goes on with it.

    <root>/<run>/.incoming-v000123-<digest of the manifest>/        the files of the version, its lock beside them

No byte in it is believed: the next pull digests each file that has its size, and pulls it again where it has another
digest than the manifest says. So nothing has to be written down or synced, and a kill leaves nothing that counts: a
file that was under way is pulled again, a manifest or a lock is no file of the version and is made again.
"""

import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from refitd_client.contract.naming import STAGING_LOCK, pulled_into, version_id
from refitd_client.files import durable
from refitd_client.files.durable import STAT_BLOCK
from refitd_client.files.plain_file import LOCK_PATIENCE, FileLock, LockHeldError


def take_up(folder: Path, sizes: Mapping[str, int]) -> FileLock | None:
    """Go on in the folder that an earlier pull left, with the files that may be of these names and sizes. Blocks.

    Returns its held lock; None where there is no such folder, or something else lies there, which is removed. Folders
    of other contents under the version's name are removed too. An OSError or LockHeldError says why it cannot be had.
    """
    for other in folder.parent.iterdir():
        if other != folder and pulled_into(other.name) == pulled_into(folder.name):
            _removed(other)
    try:
        lock = _locked(folder)
    except FileNotFoundError:
        return None
    try:
        _clear(folder, sizes)
    except BaseException as error:
        try:
            if not isinstance(error, OSError):
                raise
            durable.remove_folder(folder)
        finally:
            lock.release()
        return None
    return lock


def lacking(folder: Path, sizes: Mapping[str, int]) -> int:
    """The bytes that files of these sizes still need on the file system of the folder that they are written in."""
    there = 0
    for name, size in sizes.items():
        with suppress(OSError):
            there += min(size, (folder / name).lstat().st_blocks * STAT_BLOCK)
    return sum(sizes.values()) - there


def drop_others(root: Path, run: str, wanted: Collection[str]) -> tuple[list[str], list[str]]:
    """Remove what earlier pulls of a run left of other versions than `wanted` (ids). Blocks. Returns the ids of the
    versions of which all was removed, and of those of which something could not be removed now.
    """
    dropped: list[str] = []
    left: list[str] = []
    with suppress(FileNotFoundError):
        for folder in list((root / run).iterdir()):
            order = pulled_into(folder.name)
            if order is not None and (version := version_id(run, order)) not in wanted:
                (dropped if _removed(folder) else left).append(version)
    return dropped, left


def _locked(folder: Path) -> FileLock:
    """The lock of a folder that a pull left, held. The folder is there: one that the collector takes goes under it."""
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
    """Remove what is no file of these names and sizes that this user alone has written. An OSError says that something
    there cannot be removed, as a folder.
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
