"""The room that files take on disk. Holes take none, and no link is followed."""

import os
import stat
from contextlib import suppress

from refitd.root.handle import opened

MAX_COUNTED = 10_000  # names in the folders within one folder; what lies beyond them is not counted
_MAX_DEPTH = 16
_BLOCK = 512  # bytes: the unit of st_blocks, whatever the file system


def room_of(status: os.stat_result) -> int:
    """The bytes that a file takes. Folders, links and devices count as nothing."""
    return min(status.st_size, status.st_blocks * _BLOCK) if stat.S_ISREG(status.st_mode) else 0


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
