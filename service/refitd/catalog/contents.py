"""Reading every byte of a checkpoint once: for the files' digests, and for values that are not finite.

Both in one pass, chunk by chunk while the bytes are still in the processor's cache. Memory is one chunk a thread.
Files are read and not mapped: one that gets shorter is then an error, and not a SIGBUS that ends the service.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from refitd.catalog.header import Header
from refitd.catalog.nonfinite import NonFinite, Search
from refitd.catalog.opening import FileStat, Folder, check_unchanged
from refitd_client.contract.digest import FileDigest

CHUNK_BYTES = 2**20
MAX_THREADS = 8  # a file's digest is computed in its order, so threads share out files


class ReadingStoppedError(Exception):
    """The reading was told to stop before its end."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bytes of some files are: digests by file name, and the tensors with non-finite values."""

    digests: Mapping[str, str]
    non_finite: tuple[NonFinite, ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One pass over some files of a folder. `failed` ends it early: nobody waits for a terabyte to hear of an error."""

    folder: Folder
    files: Mapping[str, FileStat]
    headers: Mapping[str, Header]
    stop: Event
    failed: Event
    tell: Callable[[int], None] | None = None

    def file(self, name: str) -> tuple[str, tuple[NonFinite, ...]]:
        """The digest and the finds of one file."""
        try:
            with self.folder.open(name, self.files[name]) as fd:
                search = Search(name, self.headers.get(name))
                digest = self._pass(fd, self.files[name].size, search)
                check_unchanged(name, fd, self.files[name])
                return digest, search.found
        except BaseException:
            self.failed.set()
            raise

    def _pass(self, fd: int, size: int, search: Search) -> str:
        digest, position = FileDigest(), 0
        chunk = memoryview(bytearray(min(CHUNK_BYTES, size)))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while position < size:
            if self.stop.is_set() or self.failed.is_set():
                raise ReadingStoppedError
            data = chunk[: search.boundary(min(position + CHUNK_BYTES, size)) - position]
            _fill(fd, data, position)
            digest.update(data)
            search.look(data, position)
            position += len(data)
            if self.tell is not None:
                self.tell(len(data))
        return digest.text


def _fill(fd: int, data: memoryview, position: int) -> None:
    filled = 0
    while filled < len(data):
        count = os.preadv(fd, [data[filled:]], position + filled)
        if count == 0:
            raise OSError(f"the file ended at byte {position + filled} while it was read")
        filled += count


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
    reading = _Reading(folder, files, headers, stop or Event(), Event(), tell)
    names = sorted(files, key=lambda name: -files[name].size)  # the longest first: none is left over at the end
    with ThreadPoolExecutor(_threads(len(names), threads), thread_name_prefix="refitd-contents") as pool:
        futures = [pool.submit(reading.file, name) for name in names]
    _raise_first(futures)
    results = {name: future.result() for name, future in zip(names, futures, strict=True)}
    return Contents(
        {name: results[name][0] for name in sorted(results)},
        tuple(found for name in sorted(results) for found in results[name][1]),
    )


def _threads(files: int, asked: int | None) -> int:
    return max(1, min(asked or len(os.sched_getaffinity(0)), MAX_THREADS, files))


def _raise_first(futures: list[Future[tuple[str, tuple[NonFinite, ...]]]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, ReadingStoppedError)]  # the others only followed
    if errors:
        raise (causes or errors)[0]
