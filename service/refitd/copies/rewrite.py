"""A shard of a copy brought up to date: read, changed, fingerprinted and written, chunk by chunk, in one pass.

The fingerprint is that of the bytes that are written, so it costs no second pass, and what was damaged in the copy
before shows as well. The files are read and written by calls and not mapped: on file systems that write elsewhere a
full disk is an error then, and no SIGBUS that ends the service.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.catalog.contents import ReadingStoppedError
from refitd.catalog.header import Header, TensorSpec
from refitd.catalog.reading import fill
from refitd_client.delta import Change, Delta
from refitd_client.fingerprint import bits_of, fingerprint, width_of
from refitd_client.fingerprint.definition import MASK, ROW
from refitd_client.header import BITS

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


def rewrite(shard: Shard, deltas: Sequence[Delta], stop: Event) -> dict[str, int]:
    """Write a shard with deltas applied in order, and give its tensors' fingerprints.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: it cannot be read or written.
    """
    if not shard.in_place:
        _copy(shard, 0, shard.header.data_start, stop)
    return {
        name: _tensor(shard, spec, [delta.changes[name] for delta in deltas if name in delta.changes], stop)
        for name, spec in shard.header.tensors.items()
    }


def copy_file(source: int, target: int, size: int, stop: Event) -> None:
    """Copy a file that holds no tensors; raises as `rewrite`."""
    _copy(Shard(source=source, target=target, size=size, header=Header({}, size, {})), 0, size, stop)


def width_in(dtype: str) -> int:
    """Bytes that count as one element: types that deltas do not know go byte by byte."""
    return width_of(dtype) if dtype in BITS else 1


def _tensor(shard: Shard, spec: TensorSpec, changes: Sequence[Change], stop: Event) -> int:
    width = width_in(spec.dtype)
    elements = (spec.end - spec.start) // width
    step = max(ROW, CHUNK_BYTES // (ROW * width) * ROW)
    firsts = np.arange(0, elements, step, dtype=np.uint64)
    cuts = [_cuts(change, firsts) for change in changes]
    total = 0
    for number, first in enumerate(range(0, elements, step)):
        count = min(step, elements - first)
        offset = shard.header.data_start + spec.start + first * width
        bits = bits_of(_read(shard.source, offset, count * width, stop), width)
        is_dirty = not shard.in_place
        for change, cut in zip(changes, cuts, strict=True):
            part = slice(int(cut[number]), int(cut[number + 1]))
            if part.start != part.stop:
                bits[change.indices[part] - change.indices.dtype.type(first)] = change.values[part]
                is_dirty = True
        if is_dirty:
            _write(shard.target, bits.view(np.uint8), offset)
        total += fingerprint(bits, first=first)
    return total & MASK


def _cuts(change: Change, firsts: NDArray[np.uint64]) -> NDArray[Any]:
    """Where the chunks that begin at some elements begin in a change's indices, and the end."""
    begins = np.searchsorted(change.indices, firsts.astype(change.indices.dtype))
    return np.append(begins, len(change.indices))


def _copy(shard: Shard, begin: int, end: int, stop: Event) -> None:
    for offset in range(begin, end, CHUNK_BYTES):
        data = _read(shard.source, offset, min(CHUNK_BYTES, end - offset), stop)
        _write(shard.target, data, offset)


def _read(fd: int, offset: int, count: int, stop: Event) -> NDArray[np.uint8]:
    if stop.is_set():
        raise ReadingStoppedError
    data = np.empty(count, np.uint8)
    fill(fd, data.data, offset)
    return data


def _write(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    view, written = data.data, 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)
