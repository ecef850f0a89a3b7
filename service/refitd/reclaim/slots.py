"""Slots on disk: a version's files handed back to its publisher, and deleted when no publisher takes them.

`refitd_client.contract.naming` is the protocol of both sides.

A version comes here out of the trash, where `discard` has put it. So after a kill on the way the next start deletes it,
as it would without slots:

    run/v000001  →  trash/<unique>/<other>     `discard`; the run's folder and the trash are synced: the name is gone
    is it all plain files, of one name each?   else it stays in the trash
    unlink refit.json and what is no shard     sync of its folder: no manifest comes back over new bytes
    → slots/<run>/.making-<unique>             sync of the slots' folder, then of the trash's: it has one name only
    → slots/<run>/<layout>-<unique>            offered: from here on a publisher may take it

A kill before the last step leaves a `.making-…`, which no publisher takes; the next sweep deletes it. A power cut that
loses the last rename does the same.

A user who may publish into the run's folder may take its slots. One other than the service's user needs a group that
both are in; a refusal names what is missing.
"""

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from uuid import uuid4

from refitd.reclaim.trash import condemn, sync
from refitd.root.handle import below, let_through, made, opened, parts_below
from refitd.root.scan import Discarded, Gone, Refused, Slot, sentence
from refitd_client.checkpoint.header import MAX_HEADER_BYTES
from refitd_client.contract.naming import (
    MANIFEST_NAME,
    SERVICE_FOLDER,
    SLOTS,
    STAGING_LOCK,
    TRASH,
    ShardLayout,
    layout_in,
    layout_of,
    run_of_slots,
    run_slots,
    slot_name,
)
from refitd_client.files.plain_file import open_plain, read_at

MAKING = ".making-"
_SHARD_SUFFIX = ".safetensors"


class _NoSlotError(Exception):
    """A folder that cannot become a slot; the message is a sentence about it."""


def hand_back(root: int, discarded: Discarded, run: str) -> Slot | Refused:
    """Make a slot of a version that was just discarded. Blocks for a few disk syncs."""
    *box_parts, name = discarded.where.split("/")
    try:
        with below(root, (SERVICE_FOLDER, TRASH, *box_parts)) as box, opened(name, box) as folder:
            shards = _shards(folder)
            with _opened_slots(root, run, os.fstat(folder).st_uid) as slots:
                _strip(folder, {shard.name for shard in shards})
                unique = uuid4().hex
                offered = slot_name(layout_of(shards), unique)
                os.rename(name, f"{MAKING}{unique}", src_dir_fd=box, dst_dir_fd=slots)
                sync(slots)
                sync(box)
                os.rename(f"{MAKING}{unique}", offered, src_dir_fd=slots, dst_dir_fd=slots)
    except _NoSlotError as refusal:
        return Refused(discarded.path, str(refusal))
    except OSError as error:
        return Refused(discarded.path, sentence(discarded.path, error))
    return Slot(run=run, name=offered, bytes=sum(shard.size for shard in shards), layout=layout_of(shards))


def layout_at(root: int, path: str) -> str | None:
    """The layout of the version at `path`, None where its files can be no slot's."""
    parts = parts_below(path)
    try:
        with below(root, parts or ("",)) as folder:
            return layout_of(_shards(folder))
    except (_NoSlotError, OSError):
        return None


def survey(root: int) -> list[Slot]:
    """All that lies among the slots. Changes nothing. A folder that cannot be read counts as one slot with a fault."""
    try:
        with below(root, (SERVICE_FOLDER, SLOTS)) as slots:
            return [slot for name in sorted(os.listdir(slots)) for slot in _of_run(slots, name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Slot(run="", name="", fault=_unusable(error), ours=False)]


def withdraw(root: int, slot: Slot) -> Discarded | Gone | Refused:
    """Move a slot into the trash; `Gone` if a publisher has taken it."""
    try:
        with below(root, (SERVICE_FOLDER, SLOTS)) as slots:
            with opened(run_slots(slot.run), slots) as mine:
                where = condemn(root, mine, slot.name)
            with suppress(OSError):  # there are more, or one comes just now
                os.rmdir(run_slots(slot.run), dir_fd=slots)
    except FileNotFoundError:
        return Gone(slot.path)
    except OSError as error:
        return Refused(slot.path, sentence(slot.path, error))
    return Discarded(slot.path, where)


def _unusable(error: OSError) -> str:
    return f"cannot be used ({error.strerror}): no version's files are recycled until it is a folder of this service's"


def _of_run(slots: int, name: str) -> Iterator[Slot]:
    run = run_of_slots(name)
    try:
        with opened(name, slots) as mine:
            for entry in sorted(os.listdir(mine)):
                with suppress(FileNotFoundError):  # taken just now
                    yield _look(mine, run, entry)
    except OSError as error:
        yield Slot(run=run, name="", fault=f"it cannot be read: {error.strerror}", ours=False)


def _look(mine: int, run: str, name: str) -> Slot:
    layout = layout_in(name)
    if layout is None and not name.startswith(MAKING):
        return Slot(run=run, name=name, fault="was not put there by this service: it is not deleted", ours=False)
    try:
        with opened(name, mine) as folder:
            files = [file for file in os.listdir(folder) if file != STAGING_LOCK]
            size = sum(_status(folder, file).st_size for file in files)
            odd = [file for file in files if not file.endswith(_SHARD_SUFFIX)]
    except _NoSlotError as refusal:
        return Slot(run=run, name=name, fault=str(refusal))
    except NotADirectoryError:
        return Slot(run=run, name=name, fault="is no folder")
    if layout is None:
        return Slot(run=run, name=name, bytes=size, fault="was being made when the service was killed")
    fault = f"holds {odd[0]!a}, which is no slot's" if odd else None
    return Slot(run=run, name=name, bytes=size, layout=layout, fault=fault)


def _shards(folder: int) -> list[ShardLayout]:
    """The shards of a version that holds nothing but plain files that are its own."""
    shards: list[ShardLayout] = []
    for name in os.listdir(folder):
        size = _status(folder, name).st_size
        if name.endswith(_SHARD_SUFFIX):
            shards.append(ShardLayout(name=name, header=_header(folder, name, size), size=size))
    if not shards:
        raise _NoSlotError(f"it has no *{_SHARD_SUFFIX} to write another version into")
    return shards


def _status(folder: int, name: str) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise _NoSlotError(f"{name!a} is no plain file")
    if status.st_nlink != 1:
        raise _NoSlotError(f"{name!a} has {status.st_nlink} hard links: a reader of another would see it overwritten")
    if stat.S_IMODE(status.st_mode) & ~0o666:
        raise _NoSlotError(f"{name!a} has mode {stat.S_IMODE(status.st_mode):o}, which no file of weights has")
    if status.st_dev != os.fstat(folder).st_dev:
        raise _NoSlotError(f"{name!a} is on another file system")
    return status


def _header(folder: int, name: str, size: int) -> bytes:
    handle = open_plain(name, within=folder)
    try:
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise _NoSlotError(f"{name!a} is no safetensors file")
        return read_at(handle, 8 + length, 0)
    finally:
        os.close(handle)


def _strip(folder: int, shards: set[str]) -> None:
    """Remove all but the shards, the manifest first, so that a kill in between leaves no version."""
    others = sorted(set(os.listdir(folder)) - shards, key=lambda name: name != MANIFEST_NAME)
    for name in others:
        os.unlink(name, dir_fd=folder)
    sync(folder)


@contextmanager
def _opened_slots(root: int, run: str, trainer: int) -> Generator[int, None, None]:
    """A handle on the folder of a run's slots, which the trainer's user may take slots from."""
    with below(root, tuple(run.split("/"))) as folder:
        of_run = os.fstat(folder)
    with (
        made(SERVICE_FOLDER, root, 0o770) as own,
        _made_slots(own) as slots,
        made(run_slots(run), slots, 0o700) as mine,
    ):
        if len({os.fstat(handle).st_dev for handle in (root, mine)} | {of_run.st_dev}) != 1:
            raise _NoSlotError("the run is on another file system than the root: files cannot be renamed between them")
        if trainer != os.geteuid():
            let_through(own, slots)
            _share(mine, trainer, of_run, run)
        yield mine


@contextmanager
def _made_slots(own: int) -> Generator[int, None, None]:
    with ExitStack() as stack:
        try:
            slots = stack.enter_context(made(SLOTS, own, 0o711))
        except NotADirectoryError as error:
            raise _NoSlotError(f"{SERVICE_FOLDER}/{SLOTS} {_unusable(error)}") from error
        yield slots


def _share(mine: int, trainer: int, of_run: os.stat_result, run: str) -> None:
    """Give the trainer's user, or its group, the rights that it has in the run's folder."""
    now = os.fstat(mine)
    if now.st_uid == trainer:
        return
    if os.geteuid() == 0:
        os.fchown(mine, trainer, of_run.st_gid)
        return
    if not of_run.st_mode & stat.S_IWGRP:
        raise _NoSlotError(
            f"the trainer is user {trainer} and the service user {os.geteuid()}: make the folder of run {run} writable "
            "for a group that both are in"
        )
    try:
        if now.st_gid != of_run.st_gid:
            os.fchown(mine, -1, of_run.st_gid)
        os.fchmod(mine, 0o2770)
    except PermissionError as error:
        raise _NoSlotError(
            f"the trainer is user {trainer} and publishes run {run} through group {of_run.st_gid}, which the service "
            f"(user {os.geteuid()}) is not in: add it"
        ) from error
