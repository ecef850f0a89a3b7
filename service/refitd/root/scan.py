"""What lies under the root, and how discarding it ends. Only a listing: `examine` looks into version directories.

Links are not followed and dot folders not entered. A listing that fails is a value of its own, and cannot be taken for
an empty one.

The outcomes of discarding are values and no exceptions: a folder that is gone or in use is an expected case. `Incoming`
and `Slot` are what can lie under the root beside versions: folders that are being written, and slots.
"""

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from refitd_client.contract.naming import (
    INCOMING_PREFIX,
    InvalidNameError,
    Order,
    check_run,
    parse_version_folder,
    slots_path,
)
from refitd_client.validation.foreign import Trainer, holds_checkpoint, inner_folders, recognise


@dataclass(frozen=True, slots=True)
class Discarded:
    """It is out of its place and in the trash, `where` is its place there."""

    path: str
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Gone:
    """It was not there any more, which is as good."""

    path: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It was left alone; `reason` is a sentence."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Emptied:
    """How many trash folders were deleted, and sentences about what is left for the next time."""

    folders: int
    left: tuple[str, ...] = ()


def sentence(path: str, error: OSError) -> str:
    """Say what an error means for the folder at `path`, and what to do about it."""
    match error.errno:
        case errno.ENOTDIR | errno.ELOOP:
            return f"{path}, or a folder above it, is a link or no folder: links are never followed"
        case errno.EXDEV:
            return f"{path} is on another file system than the root: mount points are never crossed, delete it by hand"
        case errno.EBUSY | errno.ENOTEMPTY:
            return f"{path} is still in use (open on NFS, or a mount point): it is tried again the next time"
        case errno.EACCES | errno.EPERM:
            return f"{path} may not be deleted by this user ({error.strerror}): give its folder a shared group"
        case _:
            return f"{path} cannot be deleted now: {error.strerror}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A folder that is, or was, being written. `age` is in seconds, `bytes` counts its files."""

    path: str
    abandoned: bool
    reason: str
    age: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A folder among a run's slots. `layout` is None where it is none; `fault` says what is wrong with it.

    `ours` says whether this service can have put it there. Without a name it is the folder of a run's slots itself,
    and without a run that of all slots: neither can be read then.
    """

    run: str
    name: str
    bytes: int = 0
    layout: str | None = None
    fault: str | None = None
    ours: bool = True

    @property
    def path(self) -> str:
        """Where it lies, relative to the root."""
        return f"{slots_path(self.run)}/{self.name}".rstrip("/")


MAX_DEPTH = 8  # parts of a run's name


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFolder:
    """A version directory: `path` is relative to the root.

    A trainer's own folder (`refitd_client/validation/foreign.py`) knows of no generations: its order
    says 1, and means any.
    """

    run: str
    order: Order
    path: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All version directories, and all runs: folders into which a trainer has published, or has begun to."""

    found: tuple[FoundFolder, ...]
    runs: frozenset[str]


@dataclass(frozen=True, slots=True)
class ListingFailed:
    """The root could not be read to its end."""

    reason: str


def scan(root: Path, trainers: Collection[Trainer] = ()) -> Listing | ListingFailed:
    """List the version directories under `root`, and the folders of these trainers' own."""
    found: list[FoundFolder] = []
    runs: set[str] = set()
    try:
        _walk(root, "", found, runs, trainers, MAX_DEPTH)
    except OSError as error:
        return ListingFailed(f"the root cannot be listed: {error}")
    return Listing(tuple(found), frozenset(runs))


def _walk(
    folder: Path, run: str, found: list[FoundFolder], runs: set[str], trainers: Collection[Trainer], depth: int
) -> None:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in names:
        if name.startswith("."):
            if run and name.startswith(INCOMING_PREFIX):
                runs.add(run)
            continue
        order = parse_version_folder(name)
        if order is not None:
            if run:
                runs.add(run)
                found.append(FoundFolder(run=run, order=order, path=f"{run}/{name}"))
        elif depth > 0 and _is_run(inner := f"{run}/{name}" if run else name):
            with suppress(FileNotFoundError):  # taken away between its parent's listing and its own: nothing to list
                foreign = _foreign(folder / name, inner, trainers)
                found += foreign
                runs |= {each.run for each in foreign}
                if not foreign:
                    _walk(folder / name, inner, found, runs, trainers, depth - 1)


def _foreign(folder: Path, path: str, trainers: Collection[Trainer]) -> list[FoundFolder]:
    """The checkpoint in a folder that is called as some trainer calls its own, if there is one."""
    for at in inner_folders(path, trainers):
        meant = recognise(at, trainers)
        if meant is None:
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            if holds_checkpoint(meant, os.listdir(folder / at[len(path) :].lstrip("/"))):
                return [FoundFolder(run=meant.run, order=Order(1, meant.step), path=at)]
    return []


def _is_run(name: str) -> bool:
    try:
        check_run(name)
    except InvalidNameError:
        return False
    return True
