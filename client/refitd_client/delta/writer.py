"""A delta as the bytes of its file."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.digest import FileDigest
from refitd_client.delta import gap, wire
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, elements_of, index_type
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
from refitd_client.fingerprint import to_text, width_of
from refitd_client.lanes import in_lanes, lanes_for

_CHUNK = 2**22  # bytes digested and written at a time
_MANY = 2**17  # changes that are worth waking threads to pack them
_Placed = tuple[int, str, str, NDArray[Any]]  # bits of an element, negated; name, dtype, data
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
        """The file's bytes but for the digest of them at its end, in order."""
        found = [memoryview(self.head)]
        for array in _adjoined(self.arrays):
            data = array.data
            found += [data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK)]
        return found

    def to_bytes(self) -> bytes:
        """The whole file. Takes as much memory again."""
        parts, own = self.parts(), FileDigest()
        for part in parts:
            own.update(part)
        return b"".join([*parts, own.digest])


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
    placed: list[_Placed] = []
    for name, (tokens, indices, values) in _packed(delta.changes, encoding, compression).items():
        change = delta.changes[name]
        rows[name] = _row(change, tokens)
        placed.append(_placed(INDICES + name, indices))
        placed.append(_placed(VALUES + name, values, None if compression is Compression.ZSTD else change.dtype))
    placed.sort(key=lambda each: each[:2])  # as `header.file_order` has it
    metadata = Metadata(
        format=FORMAT,
        base=delta.base,
        version=delta.version,
        encoding=encoding,
        compression=compression,
        tensors=msgspec.json.encode(dict(sorted(rows.items()))).decode(),
    )
    located = [(name, dtype, array.shape, array.nbytes) for _, name, dtype, array in placed]
    digest = DIGEST_ENTRY.name, DIGEST_ENTRY.dtype, DIGEST_ENTRY.shape, DIGEST_ENTRY.nbytes
    head = header.encode_sized([*located, digest], metadata=msgspec.to_builtins(metadata))
    if len(head) > MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"the delta's header takes {len(head)} bytes; at most {MAX_HEADER_BYTES} are read")
    return EncodedDelta(head=head, arrays=[array for _, _, _, array in placed])


def _adjoined(arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of arrays. Those that lie one behind the other in another array come as one.

    So it is for what a GPU has sent. A thread that digests lets go of the interpreter's lock for each piece, and has
    to get it back, among others: few large pieces are better than hundreds of small ones.
    """
    base: object = None
    begin = end = 0
    for array in arrays:
        first = _address(array)
        if first != end or array.base is not base:
            yield from _between(base, begin, end)
            base, begin = array.base if _is_plain(array.base) else array, first
        end = first + array.nbytes
    yield from _between(base, begin, end)


def _between(base: object, begin: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """What an array has between two addresses."""
    if isinstance(base, np.ndarray):
        array = cast("NDArray[Any]", base).view(np.uint8)
        yield array[begin - _address(array) : end - _address(array)]


def _is_plain(base: object) -> bool:
    """Whether it is an array without gaps."""
    return isinstance(base, np.ndarray) and base.ndim == 1 and base.flags.c_contiguous


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def fits_surely(entries: Iterable[Entry], compression: Compression) -> bool:
    """Whether any delta of these tensors can be encoded. False where one has to be, to see."""
    if compression is Compression.ZSTD and not wire.available():
        return False
    known = list(entries)
    if compression is Compression.ZSTD and any(_most_packed(entry) > wire.MAX_UNPACKED_BYTES for entry in known):
        return False
    rooms = [_header_bytes(entry) for entry in known]
    return len(rooms) <= MAX_TENSORS and sum(rooms) + _OTHER_BYTES <= MAX_HEADER_BYTES


def _most_packed(entry: Entry) -> int:
    """Bytes that are compressed together at most: a tensor's indices, or its values."""
    elements = elements_of(entry.dtype, entry.shape)
    return elements * max(width_of(entry.dtype), index_type(elements)().itemsize)


def _header_bytes(entry: Entry) -> int:
    """What a tensor takes of the header at most: two entries and a row, in which its name and quotes are escaped."""
    name = msgspec.json.encode(entry.name)
    return 2 * len(name) + len(msgspec.json.encode(name.decode())) + 25 * len(entry.shape) + _OTHER_BYTES


def _packed(
    changes: Mapping[str, Change], encoding: Encoding, compression: Compression
) -> dict[str, tuple[int, NDArray[Any], NDArray[Any]]]:
    """For each tensor how many tokens of the gap encoding there are, and its indices and values as they are written."""
    if (encoding, compression) == (Encoding.FLAT, Compression.NONE):
        return {name: (0, change.indices, change.values) for name, change in changes.items()}
    tokens: dict[str, int] = {}
    indices: dict[str, NDArray[Any]] = {}
    values: dict[str, NDArray[Any]] = {}
    finished = wire.pack if compression is Compression.ZSTD else _as_it_is

    def pack_indices(name: str, change: Change, stop: Event) -> None:
        if not stop.is_set():
            found = change.indices if encoding is Encoding.FLAT else gap.encode(change.indices)
            tokens[name] = len(found) if encoding is Encoding.GAP else 0
            indices[name] = finished(found)

    def pack_values(name: str, change: Change, stop: Event) -> None:
        if not stop.is_set():
            values[name] = finished(change.values)

    largest_first = sorted(changes.items(), key=lambda pair: -len(pair[1].indices))  # it would be waited for
    jobs = [partial(pack, *pair) for pair in largest_first for pack in (pack_indices, pack_values)]
    in_lanes(jobs, lanes=lanes_for(len(jobs)) if sum(len(each.indices) for each in changes.values()) >= _MANY else 1)
    return {name: (tokens[name], indices[name], values[name]) for name in changes}


def _as_it_is(array: NDArray[Any]) -> NDArray[Any]:
    return array


def _row(change: Change, tokens: int) -> Row:
    return Row(
        dtype=change.dtype,
        shape=change.shape,
        changed=len(change.indices),
        base=to_text(change.base),
        result=to_text(change.result),
        tokens=tokens,
    )


def _placed(name: str, array: NDArray[Any], dtype: str | None = None) -> _Placed:
    """Data and what it is called. Two elements of a 4-bit type are one byte here, and are written as a U8."""
    is_itself = dtype is not None and header.BITS[dtype] == 8 * array.itemsize
    kind = dtype if is_itself and dtype is not None else UNSIGNED[array.itemsize]
    return -8 * array.itemsize, name, kind, array
