"""Reading every byte of a checkpoint once: for the files' digests, and for values that are not finite.

Both in one pass, chunk by chunk while the bytes are still in the processor's cache. Memory is one chunk a thread; the
threads share out the blocks that digests are made of, so that one large file is read as fast as many.
Files are read and not mapped: one that gets shorter is then an error, and not a SIGBUS that ends the service.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Event

import xxhash

from refitd.catalog.header import Header
from refitd.catalog.nonfinite import NonFinite, Search
from refitd.catalog.opening import FileStat, Folder, check_unchanged
from refitd.catalog.reading import fill
from refitd_client.contract.digest import BLOCK, joined

CHUNK_BYTES = 2**20
MAX_THREADS = 16


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


@dataclass(frozen=True, slots=True)
class _Reading:
    """One pass over some files of a folder. `failed` ends it early: nobody waits for a terabyte to hear of an error."""

    folder: Folder
    stop: Event
    failed: Event
    tell: Callable[[int], None] | None = None

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
        chunk = memoryview(bytearray(min(CHUNK_BYTES, end - position)))
        os.posix_fadvise(fd, position, end - position, os.POSIX_FADV_SEQUENTIAL)
        while position < end:
            if self.stop.is_set() or self.failed.is_set():
                raise ReadingStoppedError
            stop = file.search.boundary(min(position + CHUNK_BYTES, end)) if position < last else end
            data = chunk[: stop - position]
            fill(fd, data, position)
            hasher.update(data[max(0, begin - position) :])
            if position < last:
                file.search.look(data, position)
            position += len(data)
            if self.tell is not None:
                self.tell(len(data))
        return hasher.digest()


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
    reading = _Reading(folder, stop or Event(), Event(), tell)
    tasks = [(file, number) for file in read for number in range(file.blocks)]
    with ThreadPoolExecutor(_threads(len(tasks), threads), thread_name_prefix="refitd-contents") as pool:
        futures = [pool.submit(reading.block, file, number) for file, number in tasks]
    _raise_first(futures)
    results = iter([future.result() for future in futures])
    digests = {file.name: joined(list(islice(results, file.blocks))) for file in read}
    return Contents(digests, tuple(found for file in read for found in file.search.found))


def _threads(tasks: int, asked: int | None) -> int:
    return max(1, min(asked or len(os.sched_getaffinity(0)), MAX_THREADS, tasks))


def _raise_first(futures: list[Future[bytes]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, ReadingStoppedError)]  # the others only followed
    if errors:
        raise (causes or errors)[0]
