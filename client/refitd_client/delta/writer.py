"""A delta as the bytes of its file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from threading import Event
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import FileDigest, digest_of_pieces, in_blocks
from refitd_client.delta import layout
from refitd_client.delta.change import MANY_CHANGES, Change, Delta, DeltaRefusedError, elements_of, index_type
from refitd_client.delta.layout import (
    DIGEST_ENTRY,
    ENCODING,
    FORMAT,
    INDICES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    UNSIGNED,
    VALUES,
    Compression,
    Metadata,
    TensorRecord,
)
from refitd_client.errors import InvalidWeightsError
from refitd_client.files import durable
from refitd_client.fingerprint import to_text, width_of
from refitd_client.lanes import Job, in_lanes, lanes_for
from refitd_client.write.version_folder import StagedFile

_WRITTEN_AT_ONCE = 2**22  # bytes digested and written at a time
_SMALL_ARRAY = 2**14  # bytes of an array that are copied faster than it is found out where they lie
_THREADS_FROM = 2**22  # bytes that are worth waking threads for
_OTHER_BYTES = 1000  # of a header, or of one tensor in it, beside names and shapes: over twice what it really takes


@dataclass(frozen=True, kw_only=True)
class EncodedDelta:
    """The file to write: the bytes before the data, and the data without the digest. Arrays are not copied."""

    head: bytes
    arrays: Sequence[NDArray[Any]]

    @cached_property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.head) + sum(array.nbytes for array in self.arrays) + DIGEST_ENTRY.nbytes

    def parts(self) -> list[memoryview]:
        """The file's bytes in order, without the digest at its end."""
        found = [memoryview(self.head)]
        for array in _joined(self.arrays):
            data = array.data
            found += [data[begin : begin + _WRITTEN_AT_ONCE] for begin in range(0, len(data), _WRITTEN_AT_ONCE)]
        return found

    def to_bytes(self) -> bytes:
        """The whole file. Takes as much memory again."""
        parts, own = self.parts(), FileDigest()
        for part in parts:
            own.update(part)
        return b"".join([*parts, own.digest])


def encode(delta: Delta, compression: Compression = Compression.NONE) -> EncodedDelta:
    """Lay a delta out as a file. Its indices are not checked to be in strict order. Raises DeltaRefusedError if it has
    more tensors than its header may have, or zstd is wanted and missing.
    """
    if len(delta.changes) > MAX_TENSORS:
        raise DeltaRefusedError(f"{len(delta.changes)} tensors changed; a delta holds at most {MAX_TENSORS}")
    rows: dict[str, TensorRecord] = {}
    placed: list[tuple[int, str, str, NDArray[Any]]] = []
    for name, (indices, values) in _packed(delta.changes, compression).items():
        change = delta.changes[name]
        rows[name] = TensorRecord(
            dtype=change.dtype,
            shape=change.shape,
            changed=len(change.indices),
            base=to_text(change.base),
            result=to_text(change.result),
        )
        # Two elements of a 4-bit type are one byte here, and are written as a U8.
        is_own_type = compression is Compression.NONE and header.BITS[change.dtype] == 8 * values.itemsize
        value_type = change.dtype if is_own_type else UNSIGNED[values.itemsize]
        placed.append((-indices.itemsize, INDICES + name, UNSIGNED[indices.itemsize], indices))
        placed.append((-values.itemsize, VALUES + name, value_type, values))
    placed.sort(key=lambda each: each[:2])  # by element size, then name, as in `header.file_order`
    metadata = Metadata(
        format=FORMAT,
        base=delta.base,
        version=delta.version,
        encoding=ENCODING,
        compression=compression,
        tensors=msgspec.json.encode(dict(sorted(rows.items()))).decode(),
    )
    located = [(name, dtype, array.shape, array.nbytes) for _, name, dtype, array in placed]
    digest = DIGEST_ENTRY.name, DIGEST_ENTRY.dtype, DIGEST_ENTRY.shape, DIGEST_ENTRY.nbytes
    try:
        head = header.encode_sized([*located, digest], metadata=msgspec.to_builtins(metadata))
    except InvalidWeightsError as error:
        raise DeltaRefusedError(f"{len(rows)} tensors changed, which is too much for a delta's header") from error
    return EncodedDelta(head=head, arrays=[array for *_, array in placed])


def fits_surely(entries: Iterable[Entry], compression: Compression) -> bool:
    """Whether any delta of these tensors can be encoded. False means that only encoding it shows."""
    is_packed = compression is Compression.ZSTD
    if is_packed and not layout.available():
        return False
    tensors = header_bytes = 0
    for entry in entries:
        elements = elements_of(entry.dtype, entry.shape)
        item = max(width_of(entry.dtype), index_type(elements)().itemsize)
        if is_packed and elements * item > layout.MAX_UNPACKED_BYTES:  # all indices, or all values
            return False
        name = msgspec.json.encode(entry.name)  # in two entries, and once more escaped in the record
        tensors += 1
        header_bytes += 2 * len(name) + len(msgspec.json.encode(name.decode())) + 25 * len(entry.shape) + _OTHER_BYTES
    return tensors <= MAX_TENSORS and header_bytes + _OTHER_BYTES <= MAX_HEADER_BYTES


def _joined(arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of arrays: without a copy those that one array holds in a row, and the small ones between together.

    The arrays that a GPU has sent lie so. A thread that digests releases the interpreter's lock for each piece, and has
    to take it again, among others: few large pieces are better than hundreds of small ones.
    """
    small: list[NDArray[np.uint8]] = []
    size = 0
    for row in _rows(arrays):
        if row.nbytes < _SMALL_ARRAY and size < _WRITTEN_AT_ONCE:
            small.append(row)
            size += row.nbytes
            continue
        if small:
            yield np.concatenate(small)
        small, size = [], 0
        yield row
    if small:
        yield np.concatenate(small)


def _rows(arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of arrays, as many as one array holds in a row at a time."""
    arrays = list(arrays)
    begins = [_address(array) for array in arrays]
    first = 0
    for at, (array, other) in enumerate(zip_longest(arrays, arrays[1:])):
        end = begins[at] + array.nbytes
        if other is not None and other.base is array.base and begins[at + 1] == end and _is_flat(array.base):
            continue
        if first == at:
            yield array.view(np.uint8)
        else:
            memory = cast("NDArray[Any]", array.base).view(np.uint8)
            begin = _address(memory)
            yield memory[begins[first] - begin : end - begin]
        first = at + 1


def _is_flat(base: object) -> bool:
    return isinstance(base, np.ndarray) and base.ndim == 1 and base.flags.c_contiguous


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _packed(changes: Mapping[str, Change], compression: Compression) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """For each tensor its indices and values as they are written."""
    if compression is Compression.NONE:
        return {name: (change.indices, change.values) for name, change in changes.items()}
    packed: dict[tuple[str, bool], NDArray[Any]] = {}

    def pack(name: str, is_index: bool, stop: Event) -> None:
        if stop.is_set():
            return
        packed[name, is_index] = layout.pack(changes[name].indices if is_index else changes[name].values)

    largest_first = sorted(changes, key=lambda name: -len(changes[name].indices))  # else the others wait for it
    jobs = [partial(pack, name, is_index) for name in largest_first for is_index in (True, False)]
    count = sum(len(each.indices) for each in changes.values())
    in_lanes(jobs, lanes=lanes_for(len(jobs)) if count >= MANY_CHANGES else 1)
    return {name: (packed[name, True], packed[name, False]) for name in changes}


def write_parts(file: StagedFile, parts: Sequence[memoryview]) -> None:
    """Write the first bytes of a version's file, of which nothing was written, and digest them meanwhile, in several
    threads.
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

    jobs: list[Job] = [partial(each, partial(durable.write, file.fd), parts)]
    jobs += [partial(digest, number) for number in range(len(blocks))]
    jobs.append(partial(each, file.count, last))
    in_lanes(jobs, lanes=lanes_for(len(jobs)) if size >= _THREADS_FROM else 1)
    file.begin_with(digests, size - sum(map(len, last)))
