"""A delta as the bytes of its file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from refitd_client import header
from refitd_client.delta import gap, wire
from refitd_client.delta.change import Change, Delta, DeltaRefusedError
from refitd_client.delta.layout import (
    DIGEST_ENTRY,
    FORMAT,
    INDICES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    UNSIGNED,
    VALUES,
    Compression,
    Encoding,
    Metadata,
    Row,
)
from refitd_client.fingerprint import to_text
from refitd_client.header import Entry

_CHUNK = 2**22  # bytes digested and written at a time
_OTHER_BYTES = 1000  # of a header, or of one tensor in it, beside names and shapes: less than half in truth


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """What will be the file: the bytes before the data, and the data but for its digest. Arrays are not copied."""

    head: bytes
    arrays: Sequence[NDArray[Any]]

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.head) + sum(array.nbytes for array in self.arrays) + DIGEST_ENTRY.nbytes

    def parts(self) -> list[memoryview]:
        """The file's bytes but for the digest at its end, in order."""
        found = [memoryview(self.head)]
        for array in self.arrays:
            data = array.view(np.uint8).data
            found += [data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK)]
        return found

    def digest(self) -> bytes:
        """The file's last bytes."""
        hasher = xxhash.xxh3_128()
        for part in self.parts():
            hasher.update(part)
        return hasher.digest()

    def to_bytes(self) -> bytes:
        """The whole file. Takes as much memory again."""
        return b"".join([*self.parts(), self.digest()])


def encode(
    delta: Delta, encoding: Encoding = Encoding.FLAT, compression: Compression = Compression.NONE
) -> EncodedDelta:
    """Lay a delta out. Its changes are trusted to be in order.

    Raises:
        DeltaRefusedError: it has more tensors than its header may have, or zstd is wanted and missing.
    """
    if len(delta.changes) > MAX_TENSORS:
        raise DeltaRefusedError(f"{len(delta.changes)} tensors changed; a delta holds at most {MAX_TENSORS}")
    rows: dict[str, Row] = {}
    placed: list[tuple[Entry, NDArray[Any]]] = []
    for name, change in delta.changes.items():
        indices, values = _indices(change, encoding), change.values
        rows[name] = _row(change, len(indices) if encoding is Encoding.GAP else 0)
        if compression is Compression.ZSTD:
            indices, values = wire.pack(indices), wire.pack(values)
        placed.append(_placed(INDICES + name, indices))
        placed.append(_placed(VALUES + name, values, None if compression is Compression.ZSTD else change.dtype))
    placed.sort(key=lambda pair: header.file_order(pair[0]))
    metadata = Metadata(
        format=FORMAT,
        base=delta.base,
        version=delta.version,
        encoding=encoding,
        compression=compression,
        tensors=msgspec.json.encode(dict(sorted(rows.items()))).decode(),
    )
    head = header.encode([*(entry for entry, _ in placed), DIGEST_ENTRY], metadata=msgspec.to_builtins(metadata))
    if len(head) > MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"the delta's header takes {len(head)} bytes; at most {MAX_HEADER_BYTES} are read")
    return EncodedDelta(head=head, arrays=[array for _, array in placed])


def fits_surely(entries: Iterable[Entry], compression: Compression) -> bool:
    """Whether any delta of these tensors can be encoded. False where one has to be, to see."""
    if compression is Compression.ZSTD and not wire.available():
        return False
    rooms = [_header_bytes(entry) for entry in entries]
    return len(rooms) <= MAX_TENSORS and sum(rooms) + _OTHER_BYTES <= MAX_HEADER_BYTES


def _header_bytes(entry: Entry) -> int:
    """What a tensor takes of the header at most: two entries and a row, in which its name and quotes are escaped."""
    name = msgspec.json.encode(entry.name)
    return 2 * len(name) + len(msgspec.json.encode(name.decode())) + 25 * len(entry.shape) + _OTHER_BYTES


def _indices(change: Change, encoding: Encoding) -> NDArray[Any]:
    return change.indices if encoding is Encoding.FLAT else gap.encode(change.indices)


def _row(change: Change, tokens: int) -> Row:
    return Row(
        dtype=change.dtype,
        shape=change.shape,
        changed=len(change.indices),
        base=to_text(change.base),
        result=to_text(change.result),
        tokens=tokens,
    )


def _placed(name: str, array: NDArray[Any], dtype: str | None = None) -> tuple[Entry, NDArray[Any]]:
    """An entry and its data. Two elements of a 4-bit type are one byte here, and are written as a U8."""
    is_itself = dtype is not None and header.BITS[dtype] == 8 * array.itemsize
    kind = dtype if is_itself and dtype is not None else UNSIGNED[array.itemsize]
    return Entry(name=name, dtype=kind, shape=array.shape), array
