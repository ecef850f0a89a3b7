"""Reading a delta that anyone may have written: everything is checked before any of it can be used.

In this order: its size against its own header, the digest of all its bytes, the header (no name twice, no unknown word,
nothing beyond its caps), the places of the data (no holes, no overlaps), then each tensor's indices: strictly
increasing, in range. What passes can be applied to tensors of those names, dtypes and shapes without another look.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client import header
from refitd_client.contract.naming import parse_version_id
from refitd_client.delta import gap, wire
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, Indices, elements_of, index_type
from refitd_client.delta.layout import (
    DIGEST,
    DIGEST_ENTRY,
    FIRST_FORMAT,
    FORMAT,
    INDICES,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_NAME_LENGTH,
    MAX_SIZE,
    MAX_TENSORS,
    UNSIGNED,
    VALUES,
    Compression,
    Encoding,
    Metadata,
    Row,
)
from refitd_client.delta.own_digest import formats_with
from refitd_client.fingerprint import width_of
from refitd_client.header import METADATA_KEY, Entry
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.source_file import opened

MAX_BYTES = 2**38
"""Bytes that a delta's indices and values may take, unless the caller knows better: 256 GiB."""

_FORMATS = (FORMAT, FIRST_FORMAT)
_DIGEST_BYTES = DIGEST_ENTRY.nbytes
_DAMAGED = "its digest is not that of its bytes: it is damaged, or was not written to its end"
_HEX = frozenset("0123456789abcdef")
_SHOWN = 100
_AT_A_TIME = 2**20  # indices that are compared: they stay in the processor's cache


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_delta(path: Path, *, max_bytes: int = MAX_BYTES) -> Delta:
    """Read a delta's file, whole. It is read and not mapped: one that gets shorter is an error then, and no SIGBUS.

    Raises:
        DeltaRefusedError: it is none, is damaged, or takes more than `max_bytes`. The sentence names the file.
        InvalidWeightsError: it is no plain file, or cannot be opened.
        OSError: it cannot be read.
    """
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > max_bytes + MAX_HEADER_BYTES:
            raise DeltaRefusedError(f"{path} has {size} bytes, more than the {max_bytes} that are read")
        data = np.empty(size, np.uint8)
        if file.readinto(data.data) != size:
            raise DeltaRefusedError(f"{path} became shorter while it was read")
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
    head_end = _head_end(view)
    formats = _FORMATS if digested else formats_with(view[:-_DIGEST_BYTES], bytes(view[-_DIGEST_BYTES:]))
    if not formats:
        raise DeltaRefusedError(_DAMAGED)
    places, metadata = _parse_head(bytes(view[8:head_end]))
    if metadata.format not in formats:
        raise DeltaRefusedError(_DAMAGED)
    rows = _rows(metadata)
    _check_places(places, rows, metadata, len(view) - head_end)
    _check_memory(rows, max_bytes)
    body = np.frombuffer(view, np.uint8)[head_end:]
    in_order = _all_in_order(rows, places, body, metadata)
    changes = {name: _change(name, row, places, body, metadata, in_order=in_order) for name, row in rows.items()}
    return Delta(base=metadata.base, version=metadata.version, changes=changes)


def _head_end(view: memoryview) -> int:
    if len(view) < 8 + _DIGEST_BYTES:
        raise DeltaRefusedError(f"it has {len(view)} bytes, too few for a delta")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if 8 + length + _DIGEST_BYTES > len(view):
        raise DeltaRefusedError("it ends inside its header")
    return 8 + length


def _parse_head(text: bytes) -> tuple[dict[str, _Place], Metadata]:
    try:
        raw = _json(text)
        metadata = msgspec.convert(raw.pop(METADATA_KEY, None), Metadata)
        places = msgspec.convert(raw, dict[str, _Place])
    except msgspec.ValidationError as error:
        raise DeltaRefusedError(f"its header is not a delta's: {_told(error)}") from error
    if metadata.format not in _FORMATS:
        raise DeltaRefusedError(f"its format is {_told(metadata.format)}; this refitd reads {' and '.join(_FORMATS)}")
    for what, id_ in (("base", metadata.base), ("version", metadata.version)):
        if parse_version_id(id_) is None:
            raise DeltaRefusedError(f"its {what} is {_told(id_)!r}, which is no version's id")
    return places, metadata


def _rows(metadata: Metadata) -> dict[str, Row]:
    try:
        rows = msgspec.convert(_json(metadata.tensors.encode()), dict[str, Row])
    except msgspec.ValidationError as error:
        raise DeltaRefusedError(f"its list of tensors does not parse: {_told(error)}") from error
    if len(rows) > MAX_TENSORS:
        raise DeltaRefusedError(f"it has more than {MAX_TENSORS} tensors")
    for name, row in rows.items():
        _check_row(name, row, metadata.encoding)
    return rows


def _check_row(name: str, row: Row, encoding: Encoding) -> None:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise DeltaRefusedError(f"{_named(name)} has a name that is empty, too long or not printable")
    if row.dtype not in header.BITS:
        raise DeltaRefusedError(f"{_named(name)} has dtype {_told(row.dtype)!r}, which no version has")
    is_sane = len(row.shape) <= MAX_DIMENSIONS and all(0 <= size <= MAX_SIZE for size in row.shape)
    if not is_sane or prod(row.shape) > MAX_SIZE or prod(row.shape) * header.BITS[row.dtype] % 8:
        raise DeltaRefusedError(f"{_named(name)} has an impossible shape")
    if not 0 < row.changed <= elements_of(row.dtype, row.shape):
        raise DeltaRefusedError(f"{_named(name)} has {row.changed} changes, of {elements_of(row.dtype, row.shape)}")
    if (row.tokens < row.changed) if encoding is Encoding.GAP else row.tokens:
        raise DeltaRefusedError(f"{_named(name)} has {row.tokens} tokens for {row.changed} changes")
    for text in (row.base, row.result):
        if len(text) != 16 or not _HEX.issuperset(text):
            raise DeltaRefusedError(f"{_named(name)} has a fingerprint that is not 16 hexadecimal digits")


def _check_places(places: Mapping[str, _Place], rows: Mapping[str, Row], metadata: Metadata, body: int) -> None:
    expected = {DIGEST: (DIGEST_ENTRY.dtype, DIGEST_ENTRY.shape)}
    for name, row in rows.items():
        expected |= _expected(name, row, places, metadata)
    if expected.keys() != places.keys():
        raise DeltaRefusedError(f"it has other data than its list of tensors says: {_odd(expected, places)}")
    reached = 0
    for name, place in sorted(places.items(), key=lambda item: item[1].data_offsets):
        dtype, shape = expected[name]
        if (place.dtype, place.shape) != (dtype, shape):
            raise DeltaRefusedError(f"{_named(name)} is {_told(place)}, and should be {dtype} of shape {list(shape)}")
        if place.data_offsets != (reached, reached + Entry(name=name, dtype=dtype, shape=shape).nbytes):
            raise DeltaRefusedError(f"{_named(name)} lies where it leaves a hole, or over other data")
        reached = place.data_offsets[1]
    if reached != body or places[DIGEST].data_offsets[1] != body:
        raise DeltaRefusedError(f"its header speaks of {reached} bytes of data with a digest at the end; it has {body}")


def _expected(
    name: str, row: Row, places: Mapping[str, _Place], metadata: Metadata
) -> dict[str, tuple[str, tuple[int, ...]]]:
    indices, values = INDICES + name, VALUES + name
    if metadata.compression is Compression.ZSTD:  # only the data knows how long it is
        return {each: ("U8", (_length(each, places),)) for each in (indices, values)}
    width = width_of(row.dtype)
    value_type = row.dtype if header.BITS[row.dtype] == 8 * width else UNSIGNED[width]
    is_gap = metadata.encoding is Encoding.GAP
    index_dtype = "U16" if is_gap else UNSIGNED[index_type(elements_of(row.dtype, row.shape))().itemsize]
    count = row.tokens if is_gap else row.changed
    return {indices: (index_dtype, (count,)), values: (value_type, (row.changed,))}


def _length(name: str, places: Mapping[str, _Place]) -> int:
    place = places.get(name)
    if place is None or len(place.shape) != 1 or not 0 <= place.shape[0] <= MAX_SIZE:
        raise DeltaRefusedError(f"{_named(name)} is not there, or is no row of bytes")
    return place.shape[0]


def _check_memory(rows: Mapping[str, Row], max_bytes: int) -> None:
    """Before anything is unpacked: a few bytes may claim to be a terabyte."""
    needed = sum(2 * row.tokens + row.changed * (8 + width_of(row.dtype)) for row in rows.values())
    if needed > max_bytes:
        raise DeltaRefusedError(f"it would take {needed} bytes of memory; at most {max_bytes} are given to it")


def _all_in_order(
    rows: Mapping[str, Row], places: Mapping[str, _Place], body: NDArray[np.uint8], metadata: Metadata
) -> bool:
    """Whether the indices of all tensors are in strict order and range, looked at together where they lie together.

    Whoever parses beside a busy thread waits for it at each numpy operation: a few for hundreds of tensors are better
    than a few for each. False means that one has to be looked for.
    """
    if (metadata.encoding, metadata.compression) != (Encoding.FLAT, Compression.NONE):
        return False
    kinds: dict[type[Any], list[tuple[int, int, int]]] = {}
    for name, row in rows.items():
        elements = elements_of(row.dtype, row.shape)
        kinds.setdefault(index_type(elements), []).append((*places[INDICES + name].data_offsets, elements))
    return all(_in_order(sorted(spans), body, kind) for kind, spans in kinds.items())


def _in_order(spans: Sequence[tuple[int, int, int]], body: NDArray[np.uint8], kind: type[Any]) -> bool:
    """The same for (begin, end, elements) of tensors with indices of one type."""
    if any(one[1] != other[0] for one, other in pairwise(spans)):
        return False
    indices = body[spans[0][0] : spans[-1][1]].view(kind)
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


def _change(
    name: str, row: Row, places: Mapping[str, _Place], body: NDArray[np.uint8], metadata: Metadata, *, in_order: bool
) -> Change:
    elements = elements_of(row.dtype, row.shape)
    bits = np.dtype(f"<u{width_of(row.dtype)}")
    try:
        values = _array(body, places[VALUES + name], row.changed, bits, metadata)
        indices = _indices(body, places[INDICES + name], row, elements, metadata, in_order=in_order)
    except DeltaRefusedError as error:
        raise DeltaRefusedError(f"{_named(name)} {error}") from error
    base, result = int(row.base, 16), int(row.result, 16)
    return Change(dtype=row.dtype, shape=row.shape, indices=indices, values=values, base=base, result=result)


def _indices(
    body: NDArray[np.uint8], place: _Place, row: Row, elements: int, metadata: Metadata, *, in_order: bool
) -> Indices:
    kind = index_type(elements)
    if metadata.encoding is Encoding.GAP:
        tokens = _array(body, place, row.tokens, np.dtype("<u2"), metadata)
        return gap.decode(tokens, row.changed, elements, kind)
    indices = _array(body, place, row.changed, np.dtype(kind), metadata)
    if in_order:
        return indices
    if not bool(np.all(indices[1:] > indices[:-1])):
        raise DeltaRefusedError("has indices that are not in strict order")
    if int(indices[-1]) >= elements:
        raise DeltaRefusedError(f"has index {int(indices[-1])}, of {elements} elements")
    return indices


def _array(body: NDArray[np.uint8], place: _Place, count: int, kind: np.dtype[Any], metadata: Metadata) -> NDArray[Any]:
    data = body[slice(*place.data_offsets)]
    if metadata.compression is Compression.ZSTD:
        return wire.unpack(data, count, kind)
    return data.view(kind)


def _json(text: bytes) -> dict[str, Any]:
    """JSON by the letter: no name twice, no numbers that are none."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise DeltaRefusedError(f"its header does not parse: {_told(error)}") from error
    if not isinstance(found, dict):
        raise DeltaRefusedError("its header is no JSON object")
    return cast("dict[str, Any]", found)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _odd(expected: Mapping[str, Any], places: Mapping[str, Any]) -> str:
    return _named(min(expected.keys() ^ places.keys()))


def _named(name: str) -> str:
    return f"tensor {name[:_SHOWN]!a}"


def _told(what: object) -> str:
    """What anyone may have written, in a sentence: a line of it at most, and nothing that a terminal would obey."""
    return ascii(str(what)[:_SHOWN])[1:-1]
