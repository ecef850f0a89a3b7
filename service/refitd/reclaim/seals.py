"""What a folder looks like from outside, so that a later look tells whether it is still what was looked at.

A stamp sums up a file or folder: its number, kind, size and time of change. A seal sums up a folder: the stamps of all
that lies at its top. Both are hexadecimal, and can stand in a file's name. The room of a file is what it takes on disk:
holes take none. No link is followed.
"""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

import xxhash

from refitd.policy.holdings import FolderEntry
from refitd.root.handle import opened
from refitd_client.files.durable import STAT_BLOCK

MAX_NAMES = 100_000  # at the top of a folder
MAX_COUNTED = 10_000  # names in the folders within one folder; what lies beyond them is not counted
_MAX_DEPTH = 16


def entries_of(folder: int) -> dict[str, FolderEntry]:
    """Everything at the top of an open folder, hidden names too; links as links.

    Raises:
        OSError: it cannot be listed, or has more than 100,000 names.
    """
    found: dict[str, FolderEntry] = {}
    with os.scandir(folder) as listing:
        for entry in listing:
            if len(found) == MAX_NAMES:
                raise OSError(errno.E2BIG, f"it has more than {MAX_NAMES:,} names")
            with suppress(FileNotFoundError):  # removed since it was listed
                status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                is_file = stat.S_ISREG(status.st_mode)
                found[entry.name] = FolderEntry(stamp=stamp_of(status), bytes=room_of(status), is_file=is_file)
    return found


def stamp_of(status: os.stat_result) -> str:
    """What one file or folder looks like."""
    facts = (status.st_ino, stat.S_IFMT(status.st_mode))
    changing = (status.st_size, status.st_mtime_ns) if not stat.S_ISDIR(status.st_mode) else ()
    return xxhash.xxh3_64_hexdigest(repr(facts + changing).encode())


def seal_of(entries: Mapping[str, FolderEntry]) -> str:
    """What a folder looks like, from all that lies at its top."""
    hasher = xxhash.xxh3_64()
    for name, entry in sorted(entries.items()):
        hasher.update(f"{name}\0{entry.stamp}\n".encode(errors="surrogateescape"))
    return hasher.hexdigest()


def room_of(status: os.stat_result) -> int:
    """The bytes that a file takes. Folders, links and devices count as nothing."""
    return min(status.st_size, status.st_blocks * STAT_BLOCK) if stat.S_ISREG(status.st_mode) else 0


def room_within(parent: int, name: str, left: list[int], depth: int = _MAX_DEPTH) -> int:
    """The bytes that the files in a folder take. What cannot be read counts as nothing.

    Args:
        parent: a handle on the folder around it.
        name: its name there.
        left: how many more names are counted; shared by the calls of one look.
        depth: how many folders deep it goes.
    """
    total = 0
    with suppress(OSError), opened(name, parent) as folder, os.scandir(folder) as listing:
        for entry in listing:
            left[0] -= 1
            if left[0] < 0:
                break
            with suppress(FileNotFoundError):
                total += room_of(entry.stat(follow_symlinks=False))
            if depth and entry.is_dir(follow_symlinks=False):
                total += room_within(folder, entry.name, left, depth - 1)
    return total
