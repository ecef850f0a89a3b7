"""How far a publisher is with a version that it writes into a slot, for engines that copy along meanwhile.

    <run>/.incoming-<unique>/.progress    one unsigned number of 8 bytes, little-endian, for each shard in the order of
                                          their names: so many of its first bytes are written, and will not change

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

_NUMBER = 8  # bytes


class WriteProgress:
    """The file, as its publisher writes it."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Begin with nothing written.

        Args:
            folder: the folder that the version is written in.
            names: of its shards.

        Raises:
            OSError: the file cannot be made.
        """
        self._path = folder / STAGING_PROGRESS
        self._place = {name: number * _NUMBER for number, name in enumerate(sorted(names))}
        self._reached = dict.fromkeys(self._place, 0)
        self._turn = Lock()
        self._fd = durable.create(self._path)
        durable.write_at(self._fd, bytes(len(self._place) * _NUMBER), 0)

    def reached(self, name: str, end: int) -> None:
        """Say that a shard's first `end` bytes are there. For any thread, in any order."""
        with self._turn:
            if end > self._reached[name]:
                self._reached[name] = end
                durable.write_at(self._fd, pack("<Q", end), self._place[name])

    def remove(self) -> None:
        """Take its name away. Those who have it open still read what it said last."""
        durable.remove_file(self._path)

    def close(self) -> None:
        """Close it. What comes later is an error."""
        os.close(self._fd)


def open_progress(folder: int) -> int:
    """A descriptor of the file in an open folder, for `read_progress`.

    Raises:
        OSError: there is none, or it cannot be opened.
    """
    return open_plain(STAGING_PROGRESS, within=folder)


def read_progress(fd: int, count: int) -> tuple[int, ...]:
    """The bytes that are there of each of `count` shards, in the order of their names; 0 where it does not say yet."""
    data = os.pread(fd, count * _NUMBER, 0)
    return unpack(f"<{count}Q", data.ljust(count * _NUMBER, b"\0"))
