"""What a folder looks like from outside, so that a later look tells whether it is still what was looked at.

A stamp is a file's or folder's: its number, kind, size and time of change. A seal is a folder's: the stamps of all
that lies at its top. Both are hexadecimal, and can stand in a file's name.
"""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

import xxhash

from refitd.policy.holdings import Entry
from refitd.reclaim.room import room_of

MAX_NAMES = 100_000  # at the top of a folder


def entries_of(folder: int) -> dict[str, Entry]:
    """Everything at the top of an open folder, hidden names too; links as links.

    Raises:
        OSError: it cannot be listed, or has more than 100,000 names.
    """
    found: dict[str, Entry] = {}
    with os.scandir(folder) as listing:
        for entry in listing:
            if len(found) == MAX_NAMES:
                raise OSError(errno.E2BIG, f"it has more than {MAX_NAMES:,} names")
            with suppress(FileNotFoundError):  # removed since it was listed
                status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                is_file = stat.S_ISREG(status.st_mode)
                found[entry.name] = Entry(stamp=stamp_of(status), bytes=room_of(status), is_file=is_file)
    return found


def stamp_of(status: os.stat_result) -> str:
    """What one file or folder looks like."""
    facts = (status.st_ino, stat.S_IFMT(status.st_mode))
    changing = (status.st_size, status.st_mtime_ns) if not stat.S_ISDIR(status.st_mode) else ()
    return xxhash.xxh3_64_hexdigest(repr(facts + changing).encode())


def seal_of(entries: Mapping[str, Entry]) -> str:
    """What a folder looks like, from all that lies at its top."""
    hasher = xxhash.xxh3_64()
    for name, entry in sorted(entries.items()):
        hasher.update(f"{name}\0{entry.stamp}\n".encode(errors="surrogateescape"))
    return hasher.hexdigest()
