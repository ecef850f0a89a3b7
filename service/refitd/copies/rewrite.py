"""A shard of a copy brought up to date: read, changed, fingerprinted and written, chunk by chunk, in one pass.

The fingerprint is that of the bytes that are written, so it costs no second pass, and what was damaged in the copy
before shows as well. The files are read and written by calls and not mapped: on file systems that write elsewhere a
full disk is an error then, and no SIGBUS that ends the service.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd.catalog.contents import ReadingStoppedError
from refitd_client.delta import DeltaFile
from refitd_client.delta.change import Indices
from refitd_client.file_bytes import fill
from refitd_client.fingerprint import Bits, bits_of, fingerprint, width_of
from refitd_client.fingerprint.definition import MASK, ROW
from refitd_client.header import BITS
from refitd_client.strict_header import Header, TensorSpec

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard to be written from `source`, which may be the same file: descriptors, and the header of both."""

    source: int
    target: int
    size: int
    header: Header

    @property
    def in_place(self) -> bool:
        """Whether what does not change need not be written."""
        return self.source == self.target


def rewrite(shard: Shard, deltas: Sequence[DeltaFile], stop: Event) -> dict[str, int]:
    """Write a shard with deltas applied in order, and give its tensors' fingerprints.

    Raises:
        ReadingStoppedError: `stop` was set.
        DeltaRefusedError: a delta is not what it was when it was opened.
        OSError: it cannot be read or written.
    """
    if not shard.in_place:
        _copy(shard, 0, shard.header.data_start, stop)
    room = np.empty(CHUNK_BYTES, np.uint8)
    return {
        name: _tensor(
            shard, spec, [_Cursor(delta.pieces(name)) for delta in deltas if name in delta.head.rows], room, stop
        )
        for name, spec in shard.header.tensors.items()
    }


def copy_file(source: int, target: int, size: int, stop: Event) -> None:
    """Copy a file that holds no tensors; raises as `rewrite`."""
    _copy(Shard(source=source, target=target, size=size, header=Header({}, size, {})), 0, size, stop)


def width_in(dtype: str) -> int:
    """Bytes that count as one element: types that deltas do not know go byte by byte."""
    return width_of(dtype) if dtype in BITS else 1


class _Cursor:
    """The changes of a tensor, in their order. Only the piece at hand is in memory."""

    def __init__(self, pieces: Iterator[tuple[Indices, Bits]]) -> None:
        self._pieces = pieces
        self._rest: tuple[Indices, Bits] | None = None

    def before(self, end: int) -> Iterator[tuple[Indices, Bits]]:
        """What there is further on, of elements before `end`."""
        while (piece := self._rest or next(self._pieces, None)) is not None:
            indices, values = piece
            cut = (
                len(indices)
                if end > np.iinfo(indices.dtype).max
                else int(np.searchsorted(indices, indices.dtype.type(end)))
            )
            yield indices[:cut], values[:cut]
            self._rest = (indices[cut:], values[cut:]) if cut < len(indices) else None
            if self._rest is not None:
                return


def _tensor(shard: Shard, spec: TensorSpec, changes: Sequence[_Cursor], room: NDArray[np.uint8], stop: Event) -> int:
    width = width_in(spec.dtype)
    elements = (spec.end - spec.start) // width
    step = max(ROW, CHUNK_BYTES // (ROW * width) * ROW)
    total = 0
    for first in range(0, elements, step):
        count = min(step, elements - first)
        offset = shard.header.data_start + spec.start + first * width
        bits = bits_of(_read(shard.source, offset, room[: count * width], stop), width)
        is_dirty = not shard.in_place
        for change in changes:
            for indices, values in change.before(first + count):
                bits[indices - indices.dtype.type(first)] = values
                is_dirty = is_dirty or len(indices) > 0
        if is_dirty:
            _write(shard.target, bits.view(np.uint8), offset)
        total += fingerprint(bits, first=first)
    return total & MASK


def _copy(shard: Shard, begin: int, end: int, stop: Event) -> None:
    room = np.empty(min(CHUNK_BYTES, end - begin), np.uint8)
    for offset in range(begin, end, CHUNK_BYTES):
        data = _read(shard.source, offset, room[: end - offset], stop)
        _write(shard.target, data, offset)


def _read(fd: int, offset: int, data: NDArray[np.uint8], stop: Event) -> NDArray[np.uint8]:
    """Fill `data` from a file; returns it."""
    if stop.is_set():
        raise ReadingStoppedError
    fill(fd, data.data, offset)
    return data


def _write(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    view, written = data.data, 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)
