"""A publisher takes a slot: the pages of an old version, to write a new one on. See `refitd_client.contract.slot`.

    .lock in the slot           held before it moves: it is never an `.incoming-*` that looks abandoned
    rename → .incoming-…        the second one finds nothing: another publisher, or the service that takes it back
    sync of the slots' folder   before anything is written that could make a version of it: after a power cut the
                                folder has not both names

A crash before the rename leaves a slot with a free lock in it, which is a slot. One after it leaves an `.incoming-*`
without a manifest, which is collected like any other. A slot whose publication fails is thrown away.
"""

import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refitd_client.contract.naming import STAGING_LOCK
from refitd_client.contract.slot import ShardLayout, layout_in, layout_of, slots_path
from refitd_client.files import durable
from refitd_client.files.lock import FileLock, LockHeldError
from refitd_client.files.plain_file import open_folder, open_plain

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that one run's publisher may take."""

    root: Path
    run: str

    def take(self, layout: Sequence[ShardLayout], target: Path) -> FileLock | None:
        """Make a free slot that fits the folder `target`, and return its held lock; None if there is no such slot.

        A version without a layout, as a delta, takes none.
        """
        if not layout:
            return None
        folder = self.root / slots_path(self.run)
        try:
            handle = open_folder(folder)
        except OSError:  # no service hands anything back here, or not to this user
            return None
        try:
            return self._take_one(folder, handle, layout, target)
        finally:
            os.close(handle)

    def has(self, layout: Sequence[ShardLayout]) -> bool:
        """Whether a slot that fits seems to be there now. Another publisher or the service may take it first."""
        try:
            names = os.listdir(self.root / slots_path(self.run))
        except OSError:
            return False
        return bool(layout) and layout_of(layout) in map(layout_in, names)

    def _take_one(self, folder: Path, handle: int, layout: Sequence[ShardLayout], target: Path) -> FileLock | None:
        wanted = layout_of(layout)
        try:
            names = sorted(os.listdir(handle))
        except OSError:  # new files will do
            return None
        for name in names:
            if layout_in(name) == wanted and (lock := _take(folder / name, target)) is not None:
                try:
                    durable.sync_folder(folder, handle)  # by path it may be gone: the service takes empty ones away
                    fault = _fault(target, layout)
                except BaseException:
                    lock.release()
                    raise
                if fault is None:
                    return lock
                _log.warning("slot %s of run %s is thrown away: %s", name, self.run, fault)
                lock.release()
                durable.remove_folder(target)
        return None


def open_shard(path: Path) -> int:
    """A descriptor of a recycled file, to write it anew. It is never truncated."""
    return open_plain(path, os.O_RDWR)


def _take(slot: Path, target: Path) -> FileLock | None:
    try:
        lock = FileLock(slot / STAGING_LOCK)
    except (OSError, LockHeldError):  # gone meanwhile, or not ours to write in
        return None
    try:
        durable.rename(slot, target)
    except FileNotFoundError:
        lock.release()
        return None
    except PermissionError as error:
        lock.release()
        _log.warning("slot %s cannot be taken (%s): give trainer and service a shared group", slot.name, error.strerror)
        return None
    except BaseException:
        lock.release()
        raise
    return lock


def _fault(folder: Path, layout: Sequence[ShardLayout]) -> str | None:
    """Why the folder that was taken is not what its name says, None if it is."""
    sizes = {shard.name: shard.size for shard in layout}
    names = set(os.listdir(folder)) - {STAGING_LOCK}
    if names != sizes.keys():
        return f"it holds {', '.join(sorted(names ^ sizes.keys())[:3])} too many or too few"
    device = folder.parent.stat().st_dev
    for name, size in sizes.items():
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return f"{name} is not a plain file of {size} bytes"
        if status.st_nlink != 1:
            return f"{name} has {status.st_nlink} hard links, so it is another file as well"
        if status.st_dev != device:
            return f"{name} is on another file system than the run"
        if not os.access(folder / name, os.R_OK | os.W_OK):
            return f"{name} cannot be written by this user"
    return None
