"""A delta as the bytes of its file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Event
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import FileDigest, digest_of_pieces, in_blocks
from refitd_client.delta.change import Delta, DeltaRefusedError, rows_in_memory
from refitd_client.delta.head import (
    COMPRESSION,
    DIGEST_ENTRY,
    ENCODING,
    FORMAT,
    INDICES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    UNSIGNED,
    VALUES,
    Metadata,
    TensorRecord,
)
from refitd_client.errors import InvalidWeightsError
from refitd_client.files import durable
from refitd_client.fingerprint import to_text
from refitd_client.lanes import Job, in_lanes, lanes_for
from refitd_client.write.version_folder import StagedFile

_WRITTEN_AT_ONCE = 2**22  # bytes digested and written at a time
_SMALL_ARRAY = 2**14  # bytes of an array that are copied faster than it is found out where they lie
_THREADS_FROM = 2**22  # bytes that are worth waking threads for
_TENSOR_BYTES = 500  # of one tensor in a header, beside its names and its shape, at most


@dataclass(frozen=True, kw_only=True)
class EncodedDelta:
    """The file to write: the bytes before the data, and the data without the digest. Arrays are not copied."""

    head: bytes
    arrays: Sequence[NDArray[Any]]

    @cached_property
    def size(self) -> int:
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


def encode(delta: Delta) -> EncodedDelta:
    """Lay a delta out as a file. Its indices are not checked to be in strict order. Raises DeltaRefusedError if it has
    more tensors than its header may have.
    """
    if len(delta.changes) > MAX_TENSORS:
        raise DeltaRefusedError(f"{len(delta.changes)} tensors changed; a delta holds at most {MAX_TENSORS}")
    rows: dict[str, TensorRecord] = {}
    placed: list[tuple[int, str, str, NDArray[Any]]] = []
    for name, change in delta.changes.items():
        indices, values = change.indices, change.values
        rows[name] = TensorRecord(
            dtype=change.dtype,
            shape=change.shape,
            changed=len(indices),
            base=to_text(change.base),
            result=to_text(change.result),
        )
        # Two elements of a 4-bit type are one byte here, and are written as a U8.
        is_own_type = header.BITS[change.dtype] == 8 * values.itemsize
        value_type = change.dtype if is_own_type else UNSIGNED[values.itemsize]
        placed.append((-indices.itemsize, INDICES + name, UNSIGNED[indices.itemsize], indices))
        placed.append((-values.itemsize, VALUES + name, value_type, values))
    placed.sort(key=lambda each: each[:2])  # by element size, then name, as in `header.file_order`
    metadata = Metadata(
        format=FORMAT,
        base=delta.base,
        version=delta.version,
        encoding=ENCODING,
        compression=COMPRESSION,
        tensors=msgspec.json.encode(dict(sorted(rows.items()))).decode(),
    )
    located = [(name, dtype, array.shape, array.nbytes) for _, name, dtype, array in placed]
    digest = DIGEST_ENTRY.name, DIGEST_ENTRY.dtype, DIGEST_ENTRY.shape, DIGEST_ENTRY.nbytes
    try:
        head = header.encode_sized([*located, digest], metadata=msgspec.to_builtins(metadata))
    except InvalidWeightsError as error:
        raise DeltaRefusedError(f"{len(rows)} tensors changed, which is too much for a delta's header") from error
    return EncodedDelta(head=head, arrays=[array for *_, array in placed])


def fits_header(entries: Iterable[Entry]) -> bool:
    """Whether a delta that changes all of these tensors has a header that readers take."""
    tensors = size = 0
    for entry in entries:
        name = msgspec.json.encode(entry.name)  # in two entries, and once more escaped in the record
        tensors += 1
        size += 2 * len(name) + len(msgspec.json.encode(name.decode())) + 25 * len(entry.shape) + _TENSOR_BYTES
    return tensors <= MAX_TENSORS and size + 2 * _TENSOR_BYTES <= MAX_HEADER_BYTES


def _joined(arrays: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of arrays, without a copy of those that follow each other in memory. Small ones are put together.

    A thread that digests releases the interpreter's lock for each piece, and has to take it again, among others: few
    large pieces are better than hundreds of small ones.
    """
    small: list[NDArray[np.uint8]] = []
    size = 0
    for array in rows_in_memory(arrays):
        row = np.ascontiguousarray(array).view(np.uint8)
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
