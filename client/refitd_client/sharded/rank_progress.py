"""How far each rank is with a version that all ranks write into a slot.

    <run>/.incoming-<unique>/.progress    a row for each rank, in their order, of one unsigned number of 8 bytes,
                                          little-endian, for each shard in the order of their names: of the shard's
                                          first so many bytes those that this rank writes are there

All ranks' bytes are there as far as the rank says that has come least far. The file is never synced. It is removed
before the version gets its name, and what a crash leaves of it goes with its folder.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from struct import pack, unpack

from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.files import durable
from refitd_client.files.plain_file import open_plain

_NUMBER_BYTES = 8  # bytes


def begin_progress(folder: Path, shards: int, ranks: int) -> Path:
    """Make the file in the folder that the version is written in. It says that nothing is written.

    Raises:
        OSError: the file cannot be made.
    """
    path = folder / STAGING_PROGRESS
    durable.write_file(path, bytes(ranks * shards * _NUMBER_BYTES))
    return path


class WriterProgress:
    """One rank's row, as that rank says it. For one thread."""

    def __init__(self, fd: int, names: Iterable[str], rank: int) -> None:
        """Nothing is said yet.

        Args:
            fd: the open file.
            names: of the shards.
            rank: the row's number.
        """
        self._fd, shards = fd, sorted(names)
        first = rank * len(shards)
        self._place = {name: (first + number) * _NUMBER_BYTES for number, name in enumerate(shards)}
        self._reached = dict.fromkeys(self._place, 0)

    def reached(self, name: str, end: int) -> None:
        """Say that of a shard's first `end` bytes those that this rank writes are there."""
        if end > self._reached[name]:
            self._reached[name] = end
            durable.write_at(self._fd, pack("<Q", end), self._place[name])


def open_progress(folder: int) -> int:
    """A descriptor of the file in an open folder, for `read_progress` and `WriterProgress`.

    Raises:
        OSError: there is none, or it cannot be opened.
    """
    return open_plain(STAGING_PROGRESS, os.O_RDWR, within=folder)


def read_progress(fd: int, count: int) -> tuple[int, ...]:
    """The bytes that are there of each of `count` shards, in the order of their names."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    numbers = unpack(f"<{len(data) // _NUMBER_BYTES}Q", data)
    return tuple(min(numbers[shard::count]) for shard in range(count))
