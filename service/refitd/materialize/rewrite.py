"""Writes a file of a copy in one pass: read, digested, changed, digested and written, piece by piece.

The digest of what is read shows damage since the checkpoint was checked, the digest of what is written is kept for the
next time. The fingerprint of a tensor follows from the one that it had and from the elements that changed.

Pieces are large because each call of numpy, of xxhash and of the system waits for Python's lock afterwards: with 512
KiB 16 threads did little but wait. The files are read and written by calls and not mapped: on file systems that write
elsewhere a full disk is an error then, and no SIGBUS that ends the service.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import local

import numpy as np

from refitd_client.checkpoint.header import BITS
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import FileDigest
from refitd_client.delta import DeltaFile
from refitd_client.delta.change import Indices
from refitd_client.files.plain_file import fill
from refitd_client.fingerprint import Bits, TrackedWrites, bits_of, width_of
from refitd_client.validation.contents import ReadingStoppedError

PIECE = 2**24  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A file that is written to `target` from `source`: descriptors, and the header and size of both.

    `in_place`: they are one file, of which only what changes is written.
    """

    source: int
    target: int
    size: int
    header: Header
    in_place: bool


class Buffers(local):
    """The memory that each thread works in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = np.empty(PIECE, np.uint8)
        self.moved = TrackedWrites()


@dataclass(frozen=True, slots=True)
class RewrittenFile:
    """The digests of a file before and after, and by how much the fingerprints of tensors moved."""

    before: str
    after: str
    moved: dict[str, int]


def rewrite(
    file: OpenFile, deltas: Sequence[DeltaFile], buffers: Buffers, stopped: Callable[[], bool]
) -> RewrittenFile:
    """Write a file with deltas applied in order.

    Args:
        file: what is written, from what.
        deltas: what is applied.
        buffers: the thread's memory.
        stopped: is asked between pieces whether to end.

    Raises:
        ReadingStoppedError: it was to end.
        DeltaRefusedError: a delta is not what it was when it was opened.
        OSError: it cannot be read or written.
    """
    before, after = FileDigest(), FileDigest()
    for name, width, begin, end in _parts(file.header, file.size):
        cursors = [_Cursor(delta.pieces(name)) for delta in deltas if name in delta.head.rows]
        step = len(buffers.bytes) // width * width
        for at in range(begin, end, step):
            if stopped():
                raise ReadingStoppedError
            data = buffers.bytes[: min(step, end - at)]
            fill(file.source, data.data, at)
            before.update(data.data)
            first, bits, is_dirty = (at - begin) // width, bits_of(data, width), False
            for cursor in cursors:
                for indices, values in cursor.before(first + len(bits)):
                    buffers.moved.change(name, bits, first, indices, values)
                    is_dirty = True
            after.update(data.data)
            if is_dirty or not file.in_place:
                write_at(file.target, data.data, at)
    return RewrittenFile(before.text, after.text, buffers.moved.take_all())


def _parts(header: Header, size: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the parts of a file: a tensor's name, or none; the bytes of one element; where it begins and ends.

    Tensors of a type that deltas do not know go byte by byte.
    """
    yield "", 1, 0, header.data_start
    end = header.data_start
    for name, spec in header.tensors.items():
        end = header.data_start + spec.end
        yield name, width_of(spec.dtype) if spec.dtype in BITS else 1, header.data_start + spec.start, end
    yield "", 1, end, size


class _Cursor:
    """The changes of a tensor, in their order. Only the piece at hand is in memory."""

    def __init__(self, pieces: Iterator[tuple[Indices, Bits]]) -> None:
        self._pieces = pieces
        self._rest: tuple[Indices, Bits] | None = None

    def before(self, end: int) -> Iterator[tuple[Indices, Bits]]:
        """Yield the next changes, of elements before `end`."""
        while (piece := self._rest or next(self._pieces, None)) is not None:
            indices, values = piece
            cut = (
                len(indices)
                if end > np.iinfo(indices.dtype).max
                else int(np.searchsorted(indices, indices.dtype.type(end)))
            )
            if cut:
                yield indices[:cut], values[:cut]
            self._rest = (indices[cut:], values[cut:]) if cut < len(indices) else None
            if self._rest is not None:
                return


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`, of which the kernel may take less at a time.

    Args:
        fd: the file.
        data: what is written.
        offset: the byte of the file where it begins.
    """
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)
