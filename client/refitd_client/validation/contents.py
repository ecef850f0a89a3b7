"""Reading every byte of a checkpoint once: for the files' digests, for values that are not finite, and for the
tensors' fingerprints where they are wanted.

All in one pass, chunk by chunk while the bytes are still in the processor's cache. Memory is one chunk a thread, the
same for all that it reads; the threads share out the blocks that digests are made of, so that one large file is read
as fast as many.

Each thread needs the interpreter several times a chunk, and so does the loop that answers requests meanwhile. Two
threads seldom meet there, sixteen mostly wait for each other: with more threads the chunks are larger. They leave the
cache of the core then, which takes a tenth to a fifth more of the processor (`tests/bench/contents.py` measures both).
Files are read and not mapped: one that gets shorter is then an error, and not a SIGBUS that ends the service.

`read_whole` reads one file into memory and digests it on the way.
"""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, local
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import NonFinite, Search
from refitd_client.checkpoint.header import BITS, Header
from refitd_client.checkpoint.opening import FileStat, Folder, check_unchanged
from refitd_client.contract.manifest import BLOCK, digest_of_block, joined
from refitd_client.files.plain_file import fill, read_at
from refitd_client.fingerprint.host import MASK, ROW, bits_of, fingerprint, width_of
from refitd_client.lanes import MAX_LANES, in_lanes, lanes_for

CHUNK_BYTES = 2**20
MAX_THREADS = MAX_LANES
_CALM_THREADS = 4  # threads that read such chunks without waiting for each other
_PIECE = 2**21  # bytes that a thread of `read_whole` reads at a time


class ReadingStoppedError(Exception):
    """The caller stopped the reading before its end."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bytes of some files are: digests by file name, the tensors with non-finite values, and fingerprints by
    tensor where they were asked for.
    """

    digests: Mapping[str, str]
    non_finite: tuple[NonFinite, ...]
    fingerprints: Mapping[str, int] = field(default_factory=dict[str, int])


class StretchSearch(Protocol):
    """Searches a file, a stretch of bytes at a time (`checkpoint.finite.Search`)."""

    def boundary(self, position: int) -> int:
        """The last place at or before byte `position` of the file at which a stretch may begin or end."""
        ...

    def look(self, data: memoryview, position: int) -> None:
        """Search a stretch, which is at byte `position` of the file. From several threads, in any order."""
        ...


class _Fingerprinting:
    """Searches a file as another search does, and computes the fingerprints of its tensors. Its stretches begin and end
    with the rows that fingerprints are made of.
    """

    def __init__(self, search: StretchSearch, header: Header) -> None:
        specs = {name: spec for name, spec in header.tensors.items() if spec.dtype in BITS}  # the others have none
        self.found = dict.fromkeys(specs, 0)
        self._search = search
        places = [(spec.start, spec.end, width_of(spec.dtype), name) for name, spec in specs.items()]
        self._tensors = sorted(place for place in places if place[0] < place[1])
        self._data = header.data_start
        self._turn = Lock()

    def boundary(self, position: int) -> int:
        """See `StretchSearch`. A row has whole values, so this is a boundary of the other search too."""
        at, base = self._first(position), position - self._data
        if at == len(self._tensors) or base < self._tensors[at][0]:
            return self._search.boundary(position)
        begin, _, width, _ = self._tensors[at]
        return position - (base - begin) % (ROW * width)

    def look(self, data: memoryview, position: int) -> None:
        self._search.look(data, position)
        base, at = position - self._data, self._first(position)
        while at < len(self._tensors) and self._tensors[at][0] < base + len(data):
            begin, end, width, name = self._tensors[at]
            first, last = max(begin, base), min(end, base + len(data))
            part = np.frombuffer(data[first - base : last - base], np.uint8)
            share = fingerprint(bits_of(part, width), first=(first - begin) // width)
            with self._turn:  # another thread may have another part of the tensor
                self.found[name] = (self.found[name] + share) & MASK
            at += 1

    def _first(self, position: int) -> int:
        """The place in `_tensors` of the first tensor that ends after byte `position` of the file."""
        return bisect_right(self._tensors, position - self._data, key=_end)


def _end(place: tuple[int, int, int, str]) -> int:
    return place[1]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    stat: FileStat
    search: StretchSearch
    digests: list[bytes]


def read_contents(
    folder: Folder,
    files: Mapping[str, FileStat],
    headers: Mapping[str, Header],
    *,
    searches: Mapping[str, StretchSearch] | None = None,
    fingerprinted: bool = False,
    threads: int | None = None,
    stop: Event | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Contents:
    """Read files of a folder, several at a time, and search their tensors for non-finite values.

    `searches` are what files without tensors are searched by, by name. `fingerprinted` computes the fingerprints of the
    tensors in `headers`. `stop` ends the reading, and `on_read` is called with the number of bytes that were read, in
    any thread.

    Raises:
        ChangedError: a file is not, or is no longer, what the listing saw.
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read to its end.
    """
    finite = {name: Search(name, headers.get(name)) for name in sorted(files)}
    by: dict[str, StretchSearch] = finite | dict(searches or {})
    prints = {name: _Fingerprinting(by[name], headers[name]) for name in finite if fingerprinted and name in headers}
    by |= prints
    read = [_File(name, files[name], by[name], [b""] * max(1, -(-files[name].size // BLOCK))) for name in sorted(files)]
    blocks = [(file, number) for file in read for number in range(len(file.digests))]
    lanes = lanes_for(len(blocks)) if threads is None else max(1, min(threads, MAX_THREADS, len(blocks)))
    chunk, buffers = chunk_bytes(lanes), local()  # each thread reads to memory of its own

    def read_block(file: _File, number: int, failed: Event) -> None:
        """Digest a block of a file, and search it. A value that its begin cuts in two is part of this block, one that
        its end cuts is part of the next.
        """
        begin = number * BLOCK
        end = min(begin + BLOCK, file.stat.size)
        with folder.open(file.name, file.stat) as fd:
            hasher, position, last = xxhash.xxh3_128(), file.search.boundary(begin), file.search.boundary(end)
            os.posix_fadvise(fd, position, end - position, os.POSIX_FADV_SEQUENTIAL)
            while position < end:
                if stop is not None and stop.is_set():
                    raise ReadingStoppedError
                if failed.is_set():  # another block: its error should not wait for a terabyte to be read
                    return
                reached = file.search.boundary(min(position + chunk, end)) if position < last else end
                if not hasattr(buffers, "chunk"):
                    buffers.chunk = np.empty(chunk, np.uint8).data
                data: memoryview = buffers.chunk[: reached - position]
                fill(fd, data, position)
                hasher.update(data[max(0, begin - position) :])
                if position < last:
                    file.search.look(data, position)
                position += len(data)
                if on_read is not None:
                    on_read(len(data))
            check_unchanged(file.name, fd, file.stat)
        file.digests[number] = hasher.digest()

    in_lanes([partial(read_block, *block) for block in blocks], lanes=lanes)
    digests = {file.name: joined(file.digests) for file in read}
    non_finite = tuple(found for search in finite.values() for found in search.found)
    return Contents(digests, non_finite, {name: each.found[name] for each in prints.values() for name in each.found})


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes are: from byte `start` of a file to before byte `end`."""

    file: str
    start: int
    end: int


def place_of(headers: Mapping[str, Header], tensor: str) -> TensorPlace:
    file, header = next((file, header) for file, header in headers.items() if tensor in header.tensors)
    spec = header.tensors[tensor]
    return TensorPlace(file, header.data_start + spec.start, header.data_start + spec.end)


def same_bytes(one: int, other: int, first: TensorPlace, second: TensorPlace, stop: Event | None = None) -> bool:
    """Whether two tensors have the same bytes. `one` and `other` are the open files that they are in.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read.
    """
    length = first.end - first.start
    for begin in range(0, length, CHUNK_BYTES):
        if stop is not None and stop.is_set():
            raise ReadingStoppedError
        size = min(CHUNK_BYTES, length - begin)
        if read_at(one, size, first.start + begin) != read_at(other, size, second.start + begin):
            return False
    return second.end - second.start == length


def chunk_bytes(threads: int) -> int:
    return CHUNK_BYTES * max(1, threads // _CALM_THREADS)


def read_whole(fd: int, data: NDArray[np.uint8], *, stop: Event | None = None) -> str:
    """Fill `data` with the first bytes of a file, on as many cores as that is worth.

    Blocks are read in pieces, since most files have fewer blocks than there are cores. The thread that reads the last
    piece of a block digests it.

    Returns:
        Their digest, as a manifest has it.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: the file cannot be read, or is shorter.
    """
    blocks = [data[begin : begin + BLOCK] for begin in range(0, max(1, len(data)), BLOCK)]
    pieces = [(number, begin) for number, block in enumerate(blocks) for begin in range(0, max(1, len(block)), _PIECE)]
    missing = Counter(number for number, _ in pieces)
    digests = [b""] * len(blocks)
    turn = Lock()

    def read_piece(number: int, begin: int, _: Event) -> None:
        if stop is not None and stop.is_set():
            raise ReadingStoppedError
        block = blocks[number]
        fill(fd, block[begin : begin + _PIECE].data, number * BLOCK + begin)
        with turn:  # for the count alone
            missing[number] -= 1
            is_complete = not missing[number]
        if is_complete:
            digests[number] = digest_of_block(block)

    in_lanes([partial(read_piece, *piece) for piece in pieces], lanes=lanes_for(len(pieces)))
    return joined(digests)
