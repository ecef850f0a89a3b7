"""Folders by handle: every step from the root is opened relative to the one before, and a link is never followed.

A path is looked up anew at each use, and between two uses anyone with write access may put a link into it. A handle
stays on the folder that it was opened on. Paths here are relative to the root, with `/` between their parts.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_folder


@dataclass(frozen=True, slots=True)
class Identity:
    """Which folder it is, whatever its name. Sure only while a handle is open on it: numbers are used again."""

    device: int
    inode: int


def identity_of(status: os.stat_result) -> Identity:
    """The identity in what `stat` said."""
    return Identity(status.st_dev, status.st_ino)


def parts_below(path: str) -> tuple[str, ...] | None:
    """The parts of a path that lies strictly under the root and outside the service's own folder, else None."""
    parts = tuple(path.split("/"))
    unsafe = any(part in {"", ".", ".."} or "\0" in part for part in parts)
    return None if unsafe or parts[0] == SERVICE_FOLDER else parts


@contextmanager
def opened(name: str, parent: int) -> Generator[int, None, None]:
    """A handle on the folder `name` in `parent`.

    Raises:
        NotADirectoryError: it is a link or no folder.
        OSError: it cannot be opened.
    """
    handle = open_folder(name, within=parent)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def below(root: int, parts: tuple[str, ...]) -> Generator[int, None, None]:
    """A handle on the folder that `parts` lead to from the root; raises as `opened` does."""
    handle = os.dup(root)
    try:
        for part in parts:
            deeper = open_folder(part, within=handle)
            os.close(handle)
            handle = deeper
        yield handle
    finally:
        os.close(handle)


@contextmanager
def made(name: str, parent: int, mode: int) -> Generator[int, None, None]:
    """A handle on a folder, which is made when it is missing; raises as `opened` does.

    Args:
        name: the folder's name.
        parent: a handle on the folder around it.
        mode: the permissions of one that is made.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    with opened(name, parent) as handle:
        yield handle


@contextmanager
def root_at(path: str | os.PathLike[str]) -> Generator[int, None, None]:
    """A handle on the root itself, which the operator names and which may be a link."""
    handle = open_folder(path, follow=True)
    try:
        yield handle
    finally:
        os.close(handle)


def let_through(*folders: int) -> None:
    """Let other users pass through these folders; the files in them have their own permissions."""
    for folder in folders:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode | 0o011 != mode:
            os.fchmod(folder, mode | 0o011)
