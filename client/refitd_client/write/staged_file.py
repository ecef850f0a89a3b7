"""The two ways to write a file of a version: from begin to end, digested meanwhile; or in any order, as shards are."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd_client.contract.digest import FileDigest, digest_of_pieces, in_blocks
from refitd_client.contract.manifest import ManifestFile
from refitd_client.files import durable
from refitd_client.files.mapped import Mapped
from refitd_client.lanes import Job, in_lanes, lanes_for
from refitd_client.write.progress import Meter
from refitd_client.write.reserve import ReservedFile, map_reserved

_THREADS_FROM = 4 * 2**20  # bytes that are worth waking threads for
_JOB = 4 * 2**20  # bytes that one of them fills at a time


class StagedShard:
    """A file that is written in any order, by any thread, and digested by the thread that seals it.

    `mapped` is the file in memory if it is recycled and may be written that way.
    """

    def __init__(self, name: str, fd: int, mapped: Mapped | None) -> None:
        """Take over an open file."""
        self.name = name
        self.fd = fd
        self.mapped = mapped

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes from byte `offset` on."""
        if self.mapped is None:
            durable.write_at(self.fd, data.data, offset)
        else:
            durable.overwrite(self.mapped, data, offset)

    def get(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Read back `count` bytes from byte `offset` on.

        Raises:
            OSError: the file has become shorter.
        """
        if self.mapped is not None:
            return self.mapped.bytes[offset : offset + count]
        data = np.frombuffer(os.pread(self.fd, count, offset), np.uint8)
        if len(data) < count:
            raise OSError(f"{self.name} became shorter while it was read back")
        return data


class StagedFile:
    """A file that is written from begin to end, and digested meanwhile. A `reserved` one has blocks already."""

    def __init__(self, fd: int, meter: Meter, *, reserved: ReservedFile | None = None) -> None:
        """Take over a new file, of which nothing was written."""
        self.fd = fd
        self._meter = meter
        self._reserved = reserved
        self._size = 0
        self._digest = FileDigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        durable.write(self.fd, data)
        self.count(data)

    def write_all(self, parts: Sequence[memoryview]) -> None:
        """Write the file's first bytes, and digest them meanwhile, in several threads."""
        size = sum(map(len, parts))
        *blocks, last = in_blocks(parts)
        digests = [b""] * len(blocks)

        def digest(number: int, stop: Event) -> None:
            if not stop.is_set():
                digests[number] = digest_of_pieces(blocks[number])

        def each(take: Callable[[memoryview], None], parts: Sequence[memoryview], stop: Event) -> None:
            for part in parts:
                if not stop.is_set():
                    take(part)

        jobs: list[Job] = [partial(digest, number) for number in range(len(blocks))]
        jobs.append(partial(each, self.count, last))
        if self._reserved is None:
            jobs.insert(0, partial(each, partial(durable.write, self.fd), parts))
        else:  # digests first: they take longest, and would be waited for
            file = self._reserved
            if len(file.bytes) < size:
                durable.reserve(self.fd, size)
                file = map_reserved(self.fd, size)
            # By any number of threads: those that write to a file would have to wait for each other.
            jobs += [partial(_fill, file, group, offset) for offset, group in _groups(parts)]
        in_lanes(jobs, lanes=lanes_for(len(jobs)) if size >= _THREADS_FROM else 1)
        self._digest.begin_with(digests)
        digested = size - sum(map(len, last))
        self._size += digested
        self._meter.add(digested)
        os.lseek(self.fd, size, os.SEEK_SET)

    def count(self, data: bytes | memoryview) -> None:
        """Digest bytes that are in the file already, as those of a clone are."""
        self._digest.update(data)
        self._size += len(data)
        self._meter.add(len(data))

    @property
    def digest(self) -> bytes:
        """The digest of the bytes so far, as `contract/digest.py` defines it."""
        return self._digest.digest

    def entry(self) -> ManifestFile:
        """The file's entry in the manifest."""
        return ManifestFile(size=self._size, digest=self._digest.text)


def _groups(parts: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Parts that follow each other, enough for one job, and where the first of them goes."""
    groups: list[tuple[int, list[memoryview]]] = []
    offset, room = 0, 0
    for part in parts:
        if room <= 0:
            groups.append((offset, []))
            room = _JOB
        groups[-1][1].append(part)
        offset, room = offset + len(part), room - len(part)
    return groups


def _fill(file: ReservedFile, parts: Sequence[memoryview], offset: int, stop: Event) -> None:
    for part in parts:
        if stop.is_set():
            return
        durable.overwrite(file, np.frombuffer(part, np.uint8), offset)
        offset += len(part)
