"""A run's folder, held by one publisher at a time: what was published in it, and where the next step goes.

Which (generation, step) a publication gets:

    first publication of a publisher, run at g2 step 40       step 41 → g2 step 41 (it goes on)
                                                              step 40 → g3 step 40 (the trainer was restarted)
    later publication, after g2 step 41                       step 42 → g2 step 42
                                                              step 41 → conflict
    g2 step 42 had its name, which could not be synced        step 42 → g3 step 42, as after a restart

What counts as published is every `v…` folder and the record `.publisher.json`, which is written before a version gets
its name. So a version that was reclaimed meanwhile still counts, and so does one that a crash kept from its name: a
restart never reuses a name that a service or engine may know.

`take_slot` takes the pages of an old version, to write a new one on. `contract/naming.py` says what both sides keep to.

    .lock in the slot           held before it moves: it is never an `.incoming-*` that looks abandoned
    rename → .incoming-…        the second one finds nothing: another publisher, or the service that takes it back
    sync of the slots' folder   before anything is written that could make a version of it: after a power cut the
                                folder has not both names

What a publisher that is gone has left, the run's next publisher removes (`remove_dead`), or the service does.

A crash before the rename leaves a slot with a free lock in it, which is a slot. One after it leaves an `.incoming-*`
without a manifest, which is collected like any other. A slot whose publication fails is thrown away.
"""

import logging
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from refitd_client.contract import naming
from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import (
    STAGING_LOCK,
    Order,
    ShardLayout,
    layout_in,
    layout_of,
    parse_version_folder,
    slots_path,
    version_folder,
)
from refitd_client.errors import NameRefusedError, PublishError, RunBusyError, StepConflictError, StorageError
from refitd_client.files import durable
from refitd_client.files.plain_file import (
    FileLock,
    LockHeldError,
    LockState,
    is_own,
    open_folder,
    open_plain,
    read_plain,
    try_lock,
    with_advice,
)

_log = logging.getLogger("refitd_client")


RECORD_NAME = ".publisher.json"
LOCK_NAME = ".publisher.lock"
_MAX_RECORD_BYTES = 4096


def decide(step: int, *, found: Order | None, own: Order | None) -> Order | None:
    """The generation and step for a step of the trainer; None if the step is not after `own`. Pure.

    Args:
        found: the newest version of the run that was there before this publisher.
    """
    if own is not None:
        return Order(own.generation, step) if step > own.step else None
    if found is None:
        return Order(1, step)
    return Order(found.generation if step > found.step else found.generation + 1, step)


def newest_in(folder: Path) -> Order | None:
    """The newest that was ever published in a run's folder, by its `v…` folders and the record.

    Raises:
        PublishError: the record cannot be read as one.
    """
    names = (entry.name for entry in folder.iterdir() if not entry.is_symlink())  # a link is never a version
    orders = [order for name in names if (order := parse_version_folder(name)) is not None]
    record = folder / RECORD_NAME
    try:
        orders.append(from_json(read_plain(record, _MAX_RECORD_BYTES), Order))
    except FileNotFoundError:
        pass
    except msgspec.MsgspecError as error:
        raise PublishError(
            f"{record} does not hold the last generation and step of the run ({error}): remove it if "
            "all of the run's versions are still in its folder, else restore it"
        ) from error
    return max(orders, default=None)


class RunFolder:
    """`<root>/<run>/`, locked. Not for several threads at once."""

    def __init__(self, root: Path, run: str) -> None:
        """Make the folder if need be, take its lock, and see what was published in it.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher holds it.
            StorageError: it cannot be made, read or locked.
            PublishError: its record cannot be read.
        """
        try:
            self.run = naming.check_run(run)
        except naming.InvalidNameError as error:
            raise NameRefusedError(str(error)) from None
        self.root = root
        self.path = root / run
        try:
            durable.make_folders(self.path)
            self.lock = FileLock(self.path / LOCK_NAME, 0o660)
        except LockHeldError as error:
            raise _busy(run, error) from None
        except OSError as error:
            raise StorageError(f"run {run} cannot be published into {root}: {with_advice(error)}") from error
        self._own: Order | None = None
        try:
            self._found = newest_in(self.path)
        except BaseException:
            self.lock.release()
            raise

    def remove_dead(self) -> None:
        """Remove what dead publishers of this run have left. What another host may still write, on a file system of
        several, is left to the service, which goes by its age.
        """
        for folder in list(self.path.iterdir()):
            if naming.is_staging(folder.name) and not folder.is_symlink():
                try:
                    _remove_if_dead(folder)
                except FileNotFoundError:  # the service was first
                    pass
                except OSError as error:
                    _log.warning("what a dead publisher left in %s takes room: %s", folder, with_advice(error))

    def place(self, step: int) -> Order:
        """The generation and step for a step of the trainer.

        Raises:
            NameRefusedError: no version can have it.
            StepConflictError: it is not after the last, or its folder exists.
            PublishError: the publisher was closed, or belongs to the process that this one was forked from.
        """
        if not self.lock.held:
            raise PublishError(f"this publisher of run {self.run} is closed, or was opened before a fork: open another")
        try:
            placed = decide(naming.check_step(step), found=self._found, own=self._own)
        except naming.InvalidNameError as error:
            raise NameRefusedError(str(error)) from None
        if placed is None:
            last = step if self._own is None else self._own.step
            raise StepConflictError(
                f"step {step} of run {self.run} is not after step {last}, which this publisher published: "
                "publish steps in order; after a restart of the trainer, open a new publisher"
            )
        if os.path.lexists(self.folder_of(placed)):
            raise StepConflictError(f"{self.folder_of(placed)} exists: move it away, or publish a later step")
        return placed

    @property
    def is_begun(self) -> bool:
        """Whether this publisher has published."""
        return self._own is not None

    @property
    def newest(self) -> Order | None:
        """The newest that was ever published in the folder."""
        return max((order for order in (self._found, self._own) if order is not None), default=None)

    def note_known(self, order: Order) -> None:
        """Note a version that the service knows: its name is used up, as if it were still in the folder."""
        self._found = order if self._found is None else max(self._found, order)

    def begun(self, order: Order) -> str | None:
        """A sentence that a step which was just placed begins a generation of the run, None if it does not."""
        if self._own is not None or self._found is None or order.generation == self._found.generation:
            return None
        return (
            f"step {order.step} is not above {self._found.step}, the last of run {self.run}: "
            f"this begins generation {order.generation}, which takes over"
        )

    def folder_of(self, order: Order) -> Path:
        return self.path / version_folder(order)

    def record(self, order: Order, scratch: Path) -> None:
        """Note durably that a version is about to get its name. The record is first written into folder `scratch`."""
        durable.replace_file(self.path / RECORD_NAME, msgspec.json.encode(order), by=scratch / RECORD_NAME)

    def promise(self, order: Order) -> None:
        """Note durably that engines may know a version whose files do not exist yet. Its step is used up with that:
        a trainer that dies now, and does the step again, begins a generation.
        """
        self._own = order
        scratch = self.path / f"{RECORD_NAME}.new"
        durable.replace_file(self.path / RECORD_NAME, msgspec.json.encode(order), by=scratch)

    def published(self, order: Order) -> None:
        """Note that a version got its name."""
        self._own = order

    def withdrawn(self, order: Order) -> None:
        """Note that a version had its name for a moment. It may have been seen, so its step begins a generation."""
        self._found, self._own = order, None

    def take_slot(self, layout: Sequence[ShardLayout], target: Path) -> FileLock | None:
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
            return self._first_that_fits(folder, handle, layout, target)
        finally:
            os.close(handle)

    def has_slot(self, layout: Sequence[ShardLayout]) -> bool:
        """Whether a slot that fits seems to be there now. Another publisher or the service may take it first."""
        try:
            names = os.listdir(self.root / slots_path(self.run))
        except OSError:
            return False
        return bool(layout) and layout_of(layout) in map(layout_in, names)

    def _first_that_fits(
        self, folder: Path, handle: int, layout: Sequence[ShardLayout], target: Path
    ) -> FileLock | None:
        wanted = layout_of(layout)
        try:
            names = sorted(os.listdir(handle))
        except OSError:  # new files will do
            return None
        for name in names:
            if layout_in(name) == wanted and (lock := _renamed(folder / name, target)) is not None:
                try:
                    durable.sync_folder(folder, handle)  # by path it may be gone: the service takes empty ones away
                    fault = _misfit(target, layout)
                except BaseException:
                    lock.release()
                    raise
                if fault is None:
                    return lock
                _log.warning("slot %s of run %s is thrown away: %s", name, self.run, fault)
                lock.release()
                durable.remove_folder(target)
        return None


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = open_plain(folder / STAGING_LOCK)
    except FileNotFoundError:
        was_complete = (folder / naming.MANIFEST_NAME).is_file()  # its publisher was killed right before the rename
        if was_complete and is_own(folder.lstat().st_dev):
            durable.remove_folder(folder)
        return
    try:
        if try_lock(lock) is LockState.GONE:
            durable.remove_folder(folder)
    finally:
        os.close(lock)


def _renamed(slot: Path, target: Path) -> FileLock | None:
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


def _misfit(folder: Path, layout: Sequence[ShardLayout]) -> str | None:
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


def _busy(run: str, error: LockHeldError) -> RunBusyError:
    holder = error.holder
    by = "another publisher" if holder is None else f"process {holder.pid} on {holder.host}"
    there = "" if holder is None or holder.host == socket.gethostname() else f" on {holder.host}"
    return RunBusyError(
        f"run {run} is held by {by}, and a run has one publisher at a time: publish from one rank only, close that "
        f"publisher or end its process{there}, or use another run name. The lock {error.path} is free as soon as that "
        "process has ended: do not delete the file, or two publishers write into the run. If the process is a refitd "
        "that follows another one, leave it, and publish to the one that it follows",
        pid=None if holder is None else holder.pid,
        host=None if holder is None else holder.host,
    )
