"""Which version directories there are under the root. Only a listing: `examine` looks into them.

Links are not followed and dot folders not entered. A listing that fails is a value of its own, and cannot be taken for
an empty one.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from refitd_client.contract.naming import INCOMING_PREFIX, InvalidNameError, Order, check_run, parse_version_folder
from refitd_client.validation.foreign import Trainer, holds_checkpoint, inner_folders, recognise

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
