"""Going through a delta's file piece by piece, with a fixed amount of memory however large the file says that it is.

A file with holes takes no room on its disk, and a compressed one little: neither says anything of what it takes to
read them. So nothing is read whole here but the header, and one tensor at a time of a compressed file. The bounds of
both are in `layout.py` and `wire.py`.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta import gap, wire
from refitd_client.delta.change import DeltaRefusedError, Indices, elements_of, index_type
from refitd_client.delta.head import DIGEST_BYTES, Head, named, read_head
from refitd_client.delta.layout import INDICES, VALUES, Compression, Encoding, Row
from refitd_client.delta.own_digest import formats_of
from refitd_client.delta.reader import DAMAGED
from refitd_client.files.file_bytes import read_at
from refitd_client.fingerprint import Bits, width_of

AT_A_TIME = 2**17  # changes in a piece


class DeltaFile:
    """An open file whose header was read and checked. Threads may share it; the descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        """Read its header.

        Raises:
            DeltaRefusedError: it breaks a rule.
            OSError: it cannot be read.
        """
        self._fd = fd
        self.head: Head = read_head(fd)

    def check_digest(self) -> None:
        """Hold the file against the digest at its end; raises as the constructor."""
        end = os.fstat(self._fd).st_size - DIGEST_BYTES
        if self.head.metadata.format not in formats_of(self._fd, end, read_at(self._fd, DIGEST_BYTES, end)):
            raise DeltaRefusedError(DAMAGED)

    def pieces(self, name: str) -> Iterator[tuple[Indices, Bits]]:
        """A tensor's indices with their new values, in order. Each piece was checked when it is given.

        Raises:
            DeltaRefusedError: indices are not in strict order, or beyond the tensor, or the data is not as it should
                be. The sentence names the tensor.
            OSError: the file cannot be read.
        """
        row, first = self.head.rows[name], 0
        try:
            values = _Array(self, VALUES + name, row.changed, np.dtype(f"<u{width_of(row.dtype)}"))
            for indices in self._indices(name, row):
                yield indices, values.part(first, len(indices))
                first += len(indices)
        except DeltaRefusedError as error:
            raise DeltaRefusedError(f"{named(name)} {error}") from error

    def _indices(self, name: str, row: Row) -> Iterator[Indices]:
        elements = elements_of(row.dtype, row.shape)
        kind = index_type(elements)
        if self.head.metadata.encoding is Encoding.GAP:
            tokens = _Array(self, INDICES + name, row.tokens, np.dtype("<u2"))
            for found in _counted(gap.decoded(tokens.parts(), elements), row.changed):
                yield found.astype(kind)
            return
        last = -1
        for indices in _Array(self, INDICES + name, row.changed, np.dtype(kind)).parts():
            if int(indices[0]) <= last or not bool(np.all(indices[1:] > indices[:-1])):
                raise DeltaRefusedError("has indices that are not in strict order")
            last = int(indices[-1])
            if last >= elements:
                raise DeltaRefusedError(f"has index {last}, of {elements} elements")
            yield indices

    def read(self, name: str, kind: np.dtype[Any], first: int, count: int) -> NDArray[Any]:
        """So many numbers of an entry that is not compressed."""
        begin = self.head.places[name][0] + first * kind.itemsize
        return np.frombuffer(read_at(self._fd, count * kind.itemsize, begin), kind)

    def unpacked(self, name: str, kind: np.dtype[Any], count: int) -> NDArray[Any]:
        """All numbers of an entry that is compressed."""
        begin, end = self.head.places[name]
        return wire.unpack(np.frombuffer(read_at(self._fd, end - begin, begin), np.uint8), count, kind)


def _counted(parts: Iterator[NDArray[np.int64]], expected: int) -> Iterator[NDArray[np.int64]]:
    """Indices as they come, as long as there are no more than there should be."""
    count = 0
    for part in parts:
        count += len(part)
        if count > expected:
            break
        yield part
    if count != expected:
        raise DeltaRefusedError(f"has tokens for another number of indices than {expected}")


class _Array:
    """The numbers of an entry. Of a compressed one all are in memory, of another those that are asked for."""

    def __init__(self, file: DeltaFile, name: str, count: int, kind: np.dtype[Any]) -> None:
        self._file, self._name, self._count, self._kind = file, name, count, kind
        is_packed = file.head.metadata.compression is Compression.ZSTD
        self._all = file.unpacked(name, kind, count) if is_packed else None

    def part(self, first: int, count: int) -> NDArray[Any]:
        if self._all is not None:
            return self._all[first : first + count]
        return self._file.read(self._name, self._kind, first, count)

    def parts(self) -> Iterator[NDArray[Any]]:
        for first in range(0, self._count, AT_A_TIME):
            yield self.part(first, min(AT_A_TIME, self._count - first))
