"""How far a publisher is with a version that it writes into a slot, for engines that copy along meanwhile.

    <run>/.incoming-<unique>/.progress    one unsigned number of 8 bytes, little-endian, for each shard in the order of
                                          their names: so many of its first bytes are written, and will not change

Where several ranks write there is a row of such numbers for each of them, in their order, and of a shard's first bytes
each rank says so of its own among them: all are there as far as the rank says that has come least far.

It is a hint, and may be wrong: what was copied along counts only when the version is committed and the copy has the
fingerprints of the manifest. So it is never synced, and what a crash leaves of it goes with its folder. It has no name
any more when the version gets its own: a version holds nothing that its manifest does not name.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from struct import pack, unpack
from threading import Lock

from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.files import durable
from refitd_client.files.plain_file import open_plain

_NUMBER_BYTES = 8  # bytes
_MOST_WRITERS = 4096  # that are read of


class WriterProgress:
    """One writer's row, as that writer says it."""

    def __init__(self, fd: int, names: Iterable[str], writer: int = 0) -> None:
        """Nothing is said yet.

        Args:
            fd: the open file.
            names: of the shards.
            writer: the row's number.
        """
        self._fd, shards = fd, sorted(names)
        first = writer * len(shards)
        self._place = {name: (first + number) * _NUMBER_BYTES for number, name in enumerate(shards)}
        self._reached = dict.fromkeys(self._place, 0)
        self._turn = Lock()

    def reached(self, name: str, end: int) -> None:
        """Say that of a shard's first `end` bytes those that this writer writes are there. For any thread."""
        with self._turn:
            if end > self._reached[name]:
                self._reached[name] = end
                durable.write_at(self._fd, pack("<Q", end), self._place[name])


class WriteProgress(WriterProgress):
    """The file, as its publisher makes and removes it; and the first writer's row."""

    def __init__(self, folder: Path, names: Iterable[str], writers: int = 1) -> None:
        """Begin with nothing written.

        Args:
            folder: the folder that the version is written in.
            names: of its shards.
            writers: how many write into them.

        Raises:
            OSError: the file cannot be made.
        """
        self._path, shards = folder / STAGING_PROGRESS, list(names)
        super().__init__(durable.create(self._path), shards)
        durable.write_at(self._fd, bytes(writers * len(shards) * _NUMBER_BYTES), 0)

    def remove(self) -> None:
        """Take its name away. Those who have it open still read what it said last."""
        durable.remove_file(self._path)

    def close(self) -> None:
        """Close it. What comes later is an error."""
        os.close(self._fd)


def open_progress(folder: int, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file in an open folder, for `read_progress`; with os.O_RDWR also for a `WriterProgress`.

    Raises:
        OSError: there is none, or it cannot be opened.
    """
    return open_plain(STAGING_PROGRESS, flags, within=folder)


def read_progress(fd: int, count: int) -> tuple[int, ...]:
    """The bytes that are there of each of `count` shards, in the order of their names; 0 where it does not say yet."""
    row = count * _NUMBER_BYTES
    data = os.pread(fd, max(row, min(os.fstat(fd).st_size, _MOST_WRITERS * row)), 0)
    rows = [data[at : at + row].ljust(row, b"\0") for at in range(0, max(len(data), 1), max(row, 1))]
    return tuple(min(each) for each in zip(*(unpack(f"<{count}Q", each) for each in rows), strict=True))
