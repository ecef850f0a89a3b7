"""Reading a delta that anyone may have written: everything is checked before any of it can be used.

In this order: its header against its size (`head.py`), the digest of all its bytes, then each tensor's indices:
strictly increasing, in range. What passes can be applied to tensors of those names, dtypes and shapes without another
look.

Here all of it is in memory. `pieces.py` goes through a file of any size with a fixed amount of it.
"""

import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta import gap, wire
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, Indices, elements_of, index_type
from refitd_client.delta.head import DIGEST_BYTES, Head, head_in, named
from refitd_client.delta.layout import INDICES, MAX_HEADER_BYTES, VALUES, Compression, Encoding, Row
from refitd_client.delta.own_digest import formats_with
from refitd_client.files.file_bytes import fill
from refitd_client.files.source_file import opened
from refitd_client.fingerprint import width_of
from refitd_client.lanes import in_lanes, lanes_for

MAX_BYTES = 2**38
"""Bytes that a delta's indices and values may take, unless the caller knows better: 256 GiB."""

DAMAGED = "its digest is not that of its bytes: it is damaged, or was not written to its end"
_AT_A_TIME = 2**20  # indices that are compared: they stay in the processor's cache


def read_delta(path: Path, *, max_bytes: int = MAX_BYTES) -> Delta:
    """Read a delta's file, whole. It is read and not mapped: one that gets shorter is an error then, and no SIGBUS.

    Raises:
        DeltaRefusedError: it is none, is damaged, or takes more than `max_bytes`. The sentence names the file.
        InvalidWeightsError: it is no plain file, or cannot be opened.
        OSError: it cannot be read.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > max_bytes + MAX_HEADER_BYTES:
            raise DeltaRefusedError(f"{path} has {size} bytes, more than the {max_bytes} that are read")
        data = np.empty(size, np.uint8)
        fill(fd, data.data, 0)
    try:
        return parse_delta(data.data, max_bytes=max_bytes)
    except DeltaRefusedError as error:
        raise DeltaRefusedError(f"{path} is no delta to be used: {error}") from error


def parse_delta(data: bytes | memoryview, *, max_bytes: int = MAX_BYTES, digested: bool = False) -> Delta:
    """Parse the bytes of a delta's file. Arrays of the result share them where they are not encoded.

    Args:
        data: the whole file; not to be changed as long as the delta is used.
        max_bytes: how much its indices and values may take once they are decoded.
        digested: whether the bytes were held against a digest of all of them already, as a manifest has it.

    Raises:
        DeltaRefusedError: it breaks a rule. The message is a sentence about "it", the file.
    """
    view = memoryview(data)
    head = head_in(view)
    if not digested and head.metadata.format not in formats_with(view[:-DIGEST_BYTES], bytes(view[-DIGEST_BYTES:])):
        raise DeltaRefusedError(DAMAGED)
    check_memory(head, max_bytes)
    file = np.frombuffer(view, np.uint8)
    in_order = _all_in_order(head, file)
    changes = {name: _change(name, row, head, file, in_order=in_order) for name, row in head.rows.items()}
    return Delta(base=head.base, version=head.version, changes=changes)


def check_memory(head: Head, max_bytes: int) -> None:
    """See that a delta takes no more memory than there is for it, before anything is unpacked: a few bytes may claim to
    be a terabyte.

    Raises:
        DeltaRefusedError: it takes more.
    """
    if head.memory > max_bytes:
        raise DeltaRefusedError(f"it would take {head.memory} bytes of memory; at most {max_bytes} are given to it")


def _all_in_order(head: Head, file: NDArray[np.uint8]) -> bool:
    """Whether the indices of all tensors are in strict order and range, looked at together where they lie together.

    Whoever parses beside a busy thread waits for it at each numpy operation: a few for hundreds of tensors are better
    than a few for each. False means that one has to be looked for.
    """
    if (head.metadata.encoding, head.metadata.compression) != (Encoding.FLAT, Compression.NONE):
        return False
    kinds: dict[type[Any], list[tuple[int, int, int]]] = {}
    for name, row in head.rows.items():
        elements = elements_of(row.dtype, row.shape)
        kinds.setdefault(index_type(elements), []).append((*head.places[INDICES + name], elements))
    return all(_in_order(sorted(spans), file, kind) for kind, spans in kinds.items())


def _in_order(spans: Sequence[tuple[int, int, int]], file: NDArray[np.uint8], kind: type[Any]) -> bool:
    """The same for (begin, end, elements) of tensors with indices of one type."""
    if any(one[1] != other[0] for one, other in pairwise(spans)):
        return False
    indices = file[spans[0][0] : spans[-1][1]].view(kind)
    ends = np.cumsum([(end - begin) // indices.itemsize for begin, end, _ in spans])
    falls = _falls(indices)
    last = indices[ends - 1].astype(np.uint64)
    return bool(np.isin(falls, ends).all() and (last < np.array([each[2] for each in spans], np.uint64)).all())


def _falls(indices: Indices) -> NDArray[np.intp]:
    """Where an index is not above the one before it, on as many cores as that is worth."""
    begins = range(1, len(indices), _AT_A_TIME)
    found = [np.empty(0, np.intp)] * len(begins)

    def look(number: int, _: Event) -> None:
        begin, end = begins[number], min(begins[number] + _AT_A_TIME, len(indices))
        found[number] = np.flatnonzero(indices[begin:end] <= indices[begin - 1 : end - 1]) + begin

    in_lanes([partial(look, number) for number in range(len(begins))], lanes=lanes_for(len(begins)))
    return np.concatenate([np.empty(0, np.intp), *found])


def _change(name: str, row: Row, head: Head, file: NDArray[np.uint8], *, in_order: bool) -> Change:
    bits = np.dtype(f"<u{width_of(row.dtype)}")
    try:
        values = _array(file, head, VALUES + name, row.changed, bits)
        indices = _indices(file, head, INDICES + name, row, in_order=in_order)
    except DeltaRefusedError as error:
        raise DeltaRefusedError(f"{named(name)} {error}") from error
    base, result = int(row.base, 16), int(row.result, 16)
    return Change(dtype=row.dtype, shape=row.shape, indices=indices, values=values, base=base, result=result)


def _indices(file: NDArray[np.uint8], head: Head, name: str, row: Row, *, in_order: bool) -> Indices:
    elements = elements_of(row.dtype, row.shape)
    kind = index_type(elements)
    if head.metadata.encoding is Encoding.GAP:
        tokens = _array(file, head, name, row.tokens, np.dtype("<u2"))
        return gap.decode(tokens, row.changed, elements, kind)
    indices = _array(file, head, name, row.changed, np.dtype(kind))
    if in_order:
        return indices
    if not bool(np.all(indices[1:] > indices[:-1])):
        raise DeltaRefusedError("has indices that are not in strict order")
    if int(indices[-1]) >= elements:
        raise DeltaRefusedError(f"has index {int(indices[-1])}, of {elements} elements")
    return indices


def _array(file: NDArray[np.uint8], head: Head, name: str, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
    data = file[slice(*head.places[name])]
    if head.metadata.compression is Compression.ZSTD:
        return wire.unpack(data, count, kind)
    return data.view(kind)
