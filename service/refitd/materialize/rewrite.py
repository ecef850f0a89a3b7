"""Rewrites a shard of a copy, block by block: read, digested, changed, digested and written in one pass.

The digest of what is read shows damage since the checkpoint was checked, the digest of what is written is kept for the
next time. The fingerprint of a tensor follows from the one that it had and from the elements that changed.

Blocks are those of a file's digest. They are large because each call of numpy, of xxhash and of the system waits for
Python's lock afterwards: with blocks of 512 KiB 16 threads did little but wait. The files are read and written by calls
and not mapped: on file systems that write elsewhere a full disk is an error then, and no SIGBUS that ends the service.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, local

import numpy as np

from refitd_client.checkpoint.header import BITS
from refitd_client.checkpoint.strict_header import Header, TensorSpec
from refitd_client.contract.manifest import BLOCK, digest_of_block
from refitd_client.delta import DeltaFile
from refitd_client.delta.change import Indices
from refitd_client.files.plain_file import fill
from refitd_client.fingerprint import Bits, TrackedWrites, bits_of, width_of
from refitd_client.validation.contents import MAX_THREADS, ReadingStoppedError

SPAN = 4  # blocks that one thread takes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """A shard that is written to `target` from `source`: descriptors, perhaps of one file, and the header of both."""

    source: int
    target: int
    size: int
    header: Header

    @property
    def in_place(self) -> bool:
        """Whether what does not change need not be written."""
        return self.source == self.target


class Buffers(local):
    """The memory that each thread works in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = np.empty(BLOCK + 8, np.uint8)  # an element that begins in a block may end after it
        self.moved = TrackedWrites()


@dataclass(frozen=True, slots=True)
class RewrittenSpan:
    """The digests of some blocks before and after, and by how much the fingerprints of tensors moved."""

    before: list[bytes]
    after: list[bytes]
    moved: dict[str, int]


def spans_of(size: int, header: Header) -> list[range]:
    """Divide the blocks of a file between threads.

    Each span goes through the changes of its tensors from their beginning, so there are no more spans than threads
    where a file is large. Where elements lie across the ends of blocks, one thread takes all of them in order.
    """
    blocks = max(1, -(-size // BLOCK))
    aligned = all((header.data_start + spec.start) % width_in(spec.dtype) == 0 for spec in header.tensors.values())
    step = max(SPAN, -(-blocks // MAX_THREADS)) if aligned else blocks
    return [range(first, min(first + step, blocks)) for first in range(0, blocks, step)]


def rewrite(
    shard: OpenShard, blocks: range, deltas: Sequence[DeltaFile], buffers: Buffers, stop: Event
) -> RewrittenSpan:
    """Write some blocks of a shard with deltas applied in order.

    Args:
        shard: its files.
        blocks: the numbers of the blocks, without gaps.
        deltas: what is applied.
        buffers: the thread's memory.
        stop: ends it when it is set.

    Raises:
        ReadingStoppedError: `stop` was set.
        DeltaRefusedError: a delta is not what it was when it was opened.
        OSError: it cannot be read or written.
    """
    tensors = list(_tensors(shard.header, blocks, deltas))
    tail, before, after = buffers.bytes[:0], list[bytes](), list[bytes]()
    for number in blocks:
        begin = number * BLOCK
        end = min(begin + BLOCK, shard.size)
        cuts = [(tensor, *tensor.beginning_in(begin, end)) for tensor in tensors]
        whole = max([end, *(tensor.begin + last * tensor.width for tensor, first, last in cuts if first < last)])
        data = buffers.bytes[: whole - begin]
        if stop.is_set():
            raise ReadingStoppedError
        fill(shard.source, data.data, begin)
        before.append(digest_of_block(data[: end - begin]))
        data[: len(tail)] = tail  # the rest of an element that began in the block before
        is_dirty = len(tail) > 0
        for tensor, first, last in cuts:
            at = tensor.begin + first * tensor.width - begin
            bits = bits_of(data[at : at + (last - first) * tensor.width], tensor.width)
            is_dirty |= tensor.change(bits, first, last, buffers.moved)
        tail = data[end - begin :].copy()
        after.append(digest_of_block(data[: end - begin]) if is_dirty else before[-1])
        if is_dirty or not shard.in_place:
            write_at(shard.target, data[: end - begin].data, begin)
    return RewrittenSpan(before, after, buffers.moved.take_all())


def width_in(dtype: str) -> int:
    """Return the bytes of one element; tensors of a type that deltas do not know go byte by byte."""
    return width_of(dtype) if dtype in BITS else 1


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


class _Tensor:
    """A tensor that deltas change; `begin` is where it lies in its file."""

    def __init__(self, name: str, spec: TensorSpec, begin: int, deltas: Sequence[DeltaFile]) -> None:
        self.begin = begin
        self.width = width_in(spec.dtype)
        self._name = name
        self._count = (spec.end - spec.start) // self.width
        self._cursors = [_Cursor(delta.pieces(name)) for delta in deltas if name in delta.head.rows]

    def beginning_in(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first element that begins between two bytes of the file, and the one after the last."""
        first, last = (-(-(place - self.begin) // self.width) for place in (begin, end))
        return min(max(0, first), self._count), min(max(0, last), self._count)

    def skip(self, first: int) -> None:
        """Skip the changes of the elements before one."""
        for cursor in self._cursors:
            for _ in cursor.before(first):
                pass

    def change(self, bits: Bits, first: int, last: int, moved: TrackedWrites) -> bool:
        """Change elements; return whether any was changed.

        Args:
            bits: the elements.
            first: the number of the first of them.
            last: the number after the last.
            moved: takes by how much fingerprints move.
        """
        if first == last:
            return False
        is_dirty = False
        for cursor in self._cursors:
            for indices, values in cursor.before(last):
                moved.change(self._name, bits, first, indices, values)
                is_dirty = True
        return is_dirty


def _tensors(header: Header, blocks: range, deltas: Sequence[DeltaFile]) -> Iterator[_Tensor]:
    """Yield the tensors that deltas change and that have elements beginning in some blocks, at the first of these."""
    for name, spec in header.tensors.items():
        begin, end = header.data_start + spec.start, header.data_start + spec.end
        is_there = begin < blocks.stop * BLOCK and end > blocks.start * BLOCK
        if is_there and any(name in delta.head.rows for delta in deltas):
            tensor = _Tensor(name, spec, begin, deltas)
            tensor.skip(tensor.beginning_in(blocks.start * BLOCK, end)[0])
            yield tensor


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
