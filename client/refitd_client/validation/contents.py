"""Reading every byte of a checkpoint once: for the files' digests, and for values that are not finite.

Both in one pass, chunk by chunk while the bytes are still in the processor's cache. Memory is one chunk a thread, the
same for all that it reads; the threads share out the blocks that digests are made of, so that one large file is read
as fast as many.

Each thread needs the interpreter several times a chunk, and so does the loop that answers requests meanwhile. Two
threads seldom meet there, sixteen mostly wait for each other: with more threads the chunks are larger. They leave the
cache of the core then, which takes a tenth to a fifth more of the processor (`tests/bench/contents.py` measures both).
Files are read and not mapped: one that gets shorter is then an error, and not a SIGBUS that ends the service.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from threading import Event, local

import numpy as np
import xxhash

from refitd_client.checkpoint.nonfinite import NonFinite, Search
from refitd_client.checkpoint.opening import FileStat, Folder, check_unchanged
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.digest import BLOCK, joined
from refitd_client.files.file_bytes import fill

CHUNK_BYTES = 2**20
MAX_THREADS = 16
_CALM = 4  # threads that read such chunks without waiting for each other


class ReadingStoppedError(Exception):
    """The reading was told to stop before its end."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bytes of some files are: digests by file name, and the tensors with non-finite values."""

    digests: Mapping[str, str]
    non_finite: tuple[NonFinite, ...]


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is read: what the listing saw, and what is looked for in it."""

    name: str
    stat: FileStat
    search: Search

    @property
    def blocks(self) -> int:
        """How many its digest is made of."""
        return max(1, -(-self.stat.size // BLOCK))


class _Room(local):
    """Where a thread reads to. It goes with the reading."""

    chunk: memoryview | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One pass over some files of a folder. `failed` ends it early: nobody waits for a terabyte to hear of an error."""

    folder: Folder
    stop: Event
    failed: Event
    chunk: int
    tell: Callable[[int], None] | None = None
    room: _Room = field(default_factory=_Room)

    def block(self, file: _File, number: int) -> bytes:
        """The digest of one block of a file; what is not finite in it is noted."""
        try:
            with self.folder.open(file.name, file.stat) as fd:
                begin = number * BLOCK
                digest = self._pass(fd, file, begin, min(begin + BLOCK, file.stat.size))
                check_unchanged(file.name, fd, file.stat)
                return digest
        except BaseException:
            self.failed.set()
            raise

    def _pass(self, fd: int, file: _File, begin: int, end: int) -> bytes:
        """A value that the block's begin cuts in two is looked at here, one that its end does by the next block."""
        hasher, position, last = xxhash.xxh3_128(), file.search.boundary(begin), file.search.boundary(end)
        chunk = self._chunk()
        os.posix_fadvise(fd, position, end - position, os.POSIX_FADV_SEQUENTIAL)
        while position < end:
            if self.stop.is_set() or self.failed.is_set():
                raise ReadingStoppedError
            stop = file.search.boundary(min(position + self.chunk, end)) if position < last else end
            data = chunk[: stop - position]
            fill(fd, data, position)
            hasher.update(data[max(0, begin - position) :])
            if position < last:
                file.search.look(data, position)
            position += len(data)
            if self.tell is not None:
                self.tell(len(data))
        return hasher.digest()

    def _chunk(self) -> memoryview:
        if self.room.chunk is None:
            self.room.chunk = np.empty(self.chunk, np.uint8).data
        return self.room.chunk


def read_contents(
    folder: Folder,
    files: Mapping[str, FileStat],
    headers: Mapping[str, Header],
    *,
    threads: int | None = None,
    stop: Event | None = None,
    tell: Callable[[int], None] | None = None,
) -> Contents:
    """Read `files` (name → what the listing saw), several at a time, and look into the tensors of `headers`.

    `tell` hears of bytes that were read, in any thread.

    Raises:
        ChangedError: a file is not, or is no longer, what the listing saw.
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read to its end.
    """
    read = [_File(name, files[name], Search(name, headers.get(name))) for name in sorted(files)]
    tasks = [(file, number) for file in read for number in range(file.blocks)]
    lanes = _threads(len(tasks), threads)
    reading = _Reading(folder, stop or Event(), Event(), chunk_bytes(lanes), tell)
    with ThreadPoolExecutor(lanes, thread_name_prefix="refitd-contents") as pool:
        futures = [pool.submit(reading.block, file, number) for file, number in tasks]
    _raise_first(futures)
    results = iter([future.result() for future in futures])
    digests = {file.name: joined(list(islice(results, file.blocks))) for file in read}
    return Contents(digests, tuple(found for file in read for found in file.search.found))


def chunk_bytes(threads: int) -> int:
    """What each of so many threads reads at a time."""
    return CHUNK_BYTES * max(1, threads // _CALM)


def _threads(tasks: int, asked: int | None) -> int:
    return max(1, min(asked or len(os.sched_getaffinity(0)), MAX_THREADS, tasks))


def _raise_first(futures: list[Future[bytes]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, ReadingStoppedError)]  # the others only followed
    if errors:
        raise (causes or errors)[0]
