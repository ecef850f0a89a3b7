"""A file with pages for the next delta, taken from a tmpfs while the trainer makes its step.

To get pages from the kernel takes longer than to find what changed and to fill them. How many are needed is not known
before, but steps are alike: as many as the last delta took, and an eighth more. The rest is given back when the file
gets its name, all of it when a full version goes out.

The file has no name until then (O_TMPFILE): when the process dies it is gone. It is mapped, with its pages in the
table, as a fault for each of them would take longer than to copy into it; the last one's mapping is undone in the same
thread, for the same reason.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from refitd_client.contract.manifest import digest_of_pieces, in_blocks
from refitd_client.files import durable
from refitd_client.files.plain_file import is_tmpfs
from refitd_client.lanes import Job, in_lanes, lanes_for
from refitd_client.write.version_folder import StagedFile

_LEAST = 8 * 2**20  # bytes for which it is worth the trouble
_THREADS_FROM = 4 * 2**20  # bytes that are worth waking threads for
_JOB = 4 * 2**20  # bytes that one of them fills at a time


@dataclass(frozen=True, slots=True, eq=False)
class ReservedFile:
    """A file with blocks, and its content in memory. The caller that takes it closes the descriptor."""

    fd: int
    bytes: NDArray[np.uint8]


def map_reserved(fd: int, size: int) -> ReservedFile:
    """Map the first `size` bytes of a file, which must have blocks: writing to a page without one kills the process."""
    return ReservedFile(fd, np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), np.uint8))


class Reserve:
    """At most one reserved file in a folder. One caller at a time."""

    def __init__(self, folder: Path) -> None:
        """Reserve nothing before the size is known."""
        self._folder = folder
        self._expected = 0
        self._thread: Thread | None = None
        self._file: ReservedFile | None = None
        self._used: ReservedFile | None = None

    def expect(self, size: int, used: ReservedFile | None) -> None:
        """Note the bytes of the last delta. The file that it was written to, if any, is not needed any more."""
        self._expected = size + size // 8
        self._used = used

    def begin(self) -> None:
        """Reserve a file, in a thread, unless there is one."""
        if self._expected >= _LEAST and self._thread is None and self._file is None:
            self._thread = Thread(target=self._make, name="refitd-reserve")
            self._thread.start()

    def take(self) -> ReservedFile | None:
        """The reserved file, which is the caller's from here on. None if there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        taken, self._file = self._file, None
        return taken

    def close(self) -> None:
        """Give the file back."""
        if (taken := self.take()) is not None:
            os.close(taken.fd)
        self._used = None

    def _make(self) -> None:
        try:
            if not is_tmpfs(self._folder.stat().st_dev):
                return
            fd = durable.create_nameless(self._folder)
            try:
                durable.reserve(fd, self._expected)
                made = map_reserved(fd, self._expected)
                durable.touch_pages(made)
                self._file = made
            except BaseException:
                os.close(fd)
                raise
        except OSError:  # then the file is made when it is written, and that says what is wrong
            pass
        finally:
            self._used = None


def write_parts(file: StagedFile, parts: Sequence[memoryview], reserved: ReservedFile | None) -> None:
    """Write the first bytes of a version's file, and digest them meanwhile, in several threads.

    Args:
        file: the file, of which nothing was written.
        parts: the bytes, in pieces.
        reserved: the same file with its blocks in memory, if they were reserved.
    """
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
    jobs.append(partial(each, file.count, last))
    if reserved is None:
        jobs.insert(0, partial(each, partial(durable.write, file.fd), parts))
    else:  # digests first: they take longest, and would be waited for
        if len(reserved.bytes) < size:
            durable.reserve(file.fd, size)
            reserved = map_reserved(file.fd, size)
        # By any number of threads: those that write to a file would have to wait for each other.
        jobs += [partial(_fill, reserved, group, offset) for offset, group in _groups(parts)]
    in_lanes(jobs, lanes=lanes_for(len(jobs)) if size >= _THREADS_FROM else 1)
    file.begin_with(digests, size - sum(map(len, last)))
    os.lseek(file.fd, size, os.SEEK_SET)


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
