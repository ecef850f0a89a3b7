"""A file of a version that is written from its begin to its end, and digested meanwhile."""

import os
from collections.abc import Sequence
from functools import partial
from threading import Event

import numpy as np

from refitd_client.contract.digest import FileDigest, digest_of_pieces, in_blocks
from refitd_client.contract.manifest import ManifestFile
from refitd_client.files import durable
from refitd_client.lanes import Job, in_lanes, lanes_for
from refitd_client.write.progress import Meter
from refitd_client.write.reserve import Room, room_in

_THREADS_FROM = 4 * 2**20  # bytes that are worth waking threads for
_JOB = 4 * 2**20  # bytes that one of them fills at a time


class StagedFile:
    """A file of the version, digested as it is written. With `room` it is on a tmpfs and has blocks already."""

    def __init__(self, fd: int, meter: Meter, *, room: Room | None = None) -> None:
        """Take over a new file, of which nothing was written."""
        self.fd = fd
        self._meter = meter
        self._room = room
        self._size = 0
        self._digest = FileDigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        durable.write(self.fd, data)
        self.count(data)

    def write_all(self, parts: Sequence[memoryview]) -> None:
        """Write the file's first bytes, and digest them meanwhile."""
        size = sum(map(len, parts))
        *whole, last = in_blocks(parts)
        digests = [b""] * len(whole)
        counting: list[Job] = [partial(_digest, digests, number, block) for number, block in enumerate(whole)]
        counting.append(partial(self._count_all, last))
        if self._room is None:
            jobs = [partial(self._append_all, parts), *counting]
        else:  # what takes longest comes first: it would be waited for
            jobs = [*counting, *self._filling(self._room, parts, size)]
        in_lanes(jobs, lanes=lanes_for(len(jobs)) if size >= _THREADS_FROM else 1)
        self._digest.begin_with(digests)
        done = size - sum(map(len, last))
        self._size += done
        self._meter.add(done)
        os.lseek(self.fd, size, os.SEEK_SET)

    def _filling(self, room: Room, parts: Sequence[memoryview], size: int) -> list[Job]:
        """Fill the room, by any number of threads: to write to a file they would have to wait for each other."""
        if len(room.bytes) < size:
            durable.reserve(self.fd, size)
            room = room_in(self.fd, size)
        return [partial(_fill, room, group, offset) for offset, group in _groups(parts)]

    def _append_all(self, parts: Sequence[memoryview], stop: Event) -> None:
        for part in parts:
            if stop.is_set():
                return
            durable.write(self.fd, part)

    def _count_all(self, parts: Sequence[memoryview], stop: Event) -> None:
        for part in parts:
            if stop.is_set():
                return
            self.count(part)

    def count(self, data: bytes | memoryview) -> None:
        """Digest bytes that are in the file already, as those of a clone are."""
        self._digest.update(data)
        self._size += len(data)
        self._meter.add(len(data))

    @property
    def digest(self) -> bytes:
        """Of the bytes so far, as `contract/digest.py` has it."""
        return self._digest.digest

    def entry(self) -> ManifestFile:
        """What the manifest says of it."""
        return ManifestFile(size=self._size, digest=self._digest.text)


def _groups(parts: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Parts that follow each other, worth a job together, and where the first of them goes."""
    groups: list[tuple[int, list[memoryview]]] = []
    offset, room = 0, 0
    for part in parts:
        if room <= 0:
            groups.append((offset, []))
            room = _JOB
        groups[-1][1].append(part)
        offset, room = offset + len(part), room - len(part)
    return groups


def _digest(digests: list[bytes], number: int, pieces: Sequence[memoryview], stop: Event) -> None:
    if not stop.is_set():
        digests[number] = digest_of_pieces(pieces)


def _fill(room: Room, parts: Sequence[memoryview], offset: int, stop: Event) -> None:
    for part in parts:
        if stop.is_set():
            return
        durable.overwrite(room, np.frombuffer(part, np.uint8), offset)
        offset += len(part)
