"""The header of a delta from an untrusted writer, checked before a byte of the data is read.

It says where each tensor's indices and values lie, and how many there are. All of it is checked against the file's
size, and the counts against the tensors' shapes, so readers know how much memory each part takes before they take any.
Names and records are parsed one after another: a header takes a few times its own size in memory and never more.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import msgspec

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import METADATA_KEY, Entry
from refitd_client.checkpoint.pairs import OBJECTS, STRINGS, PairsRefusedError, pairs, text
from refitd_client.contract.decoding import converted, from_json, json_decoder
from refitd_client.contract.naming import NO_NAME, is_tensor_name, parse_version_id
from refitd_client.delta import gap
from refitd_client.delta.change import DeltaRefusedError, elements_of, index_type
from refitd_client.delta.layout import (
    DIGEST,
    DIGEST_ENTRY,
    FORMAT,
    INDICES,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_SIZE,
    MAX_TENSORS,
    UNSIGNED,
    VALUES,
    Compression,
    Encoding,
    Metadata,
    TensorRecord,
)
from refitd_client.delta.wire import MAX_UNPACKED_BYTES, packed_bytes
from refitd_client.files.plain_file import read_at
from refitd_client.fingerprint import width_of

DIGEST_BYTES = DIGEST_ENTRY.nbytes
_HEX = frozenset("0123456789abcdef")
_AT_ONCE = 2**20  # bytes of JSON: at most some hundred thousand keys, 40 MB
_SHOWN = 100  # characters of foreign text that an error message repeats
_WIDTHS = {name: width for width, name in UNSIGNED.items()}

_KindT = TypeVar("_KindT")


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A checked header. `rows` are the changed tensors by name, `places` the first byte and the end of each entry's
    data in the file; `source` is its text, `size` that of the file.
    """

    metadata: Metadata
    rows: Mapping[str, TensorRecord]
    places: Mapping[str, tuple[int, int]]
    source: bytes = field(repr=False)
    size: int

    def is_of(self, view: memoryview) -> bool:
        """Whether a file in memory has this very header, and the size that it was checked against."""
        begin = len(self.source).to_bytes(8, "little") + self.source
        return len(view) == self.size and bytes(view[: len(begin)]) == begin

    @property
    def base(self) -> str:
        """The id of the version that the delta leads from."""
        return self.metadata.base

    @property
    def version(self) -> str:
        """The id of the version that it leads to."""
        return self.metadata.version

    @property
    def memory(self) -> int:
        """Bytes that all indices and values take once they are decoded."""
        return sum(2 * row.tokens + row.changed * bytes_of_change(row.dtype, row.shape) for row in self.rows.values())


def bytes_of_change(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of the index and the value of one changed element of a tensor."""
    return index_type(elements_of(dtype, shape))().itemsize + width_of(dtype)


def read_head(fd: int) -> Head:
    """Read and check the header of an open file. No other part of the file is read.

    Raises:
        DeltaRefusedError: it breaks a rule. The message is a sentence about "it", the file.
        OSError: it cannot be read.
    """
    size = os.fstat(fd).st_size
    return _parse(read_at(fd, _header_length(read_at(fd, min(8, size), 0), size), 8), size)


def head_in(view: memoryview) -> Head:
    """As `read_head`, of a file in memory."""
    length = _header_length(bytes(view[:8]), len(view))
    return _parse(bytes(view[8 : 8 + length]), len(view))


def named(name: str) -> str:
    """A tensor's name as error messages show it."""
    return f"tensor {name[:_SHOWN]!a}"


def _header_length(begin: bytes, size: int) -> int:
    if size < 8 + DIGEST_BYTES:
        raise DeltaRefusedError(f"it has {size} bytes, too few for a delta")
    length = int.from_bytes(begin, "little")
    if length > MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if 8 + length + DIGEST_BYTES > size:
        raise DeltaRefusedError("it ends inside its header")
    return length


def _parse(data: bytes, size: int) -> Head:
    """Check the JSON of the header of a file of `size` bytes."""
    try:
        places, metadata = _places(data)
        rows = _rows(metadata)
    except PairsRefusedError as error:
        raise DeltaRefusedError(f"its header does not parse: {_shown(error)}") from error
    begin = 8 + len(data)
    _check_places(places, rows, metadata, size - begin)
    spans = {name: (begin + place.data_offsets[0], begin + place.data_offsets[1]) for name, place in places.items()}
    return Head(metadata=metadata, rows=rows, places=spans, source=data, size=size)


def _places(data: bytes) -> tuple[dict[str, _Place], Metadata]:
    places: dict[str, _Place] = {}
    metadata: Metadata | None = None
    for name, value in _unique(data):
        if name == METADATA_KEY:
            metadata = _metadata(value)
        else:
            places[name] = _decoded(value, _Place, 8, "its header is not a delta's")
        if len(places) > 2 * MAX_TENSORS + 1:
            raise DeltaRefusedError(f"it has more than {MAX_TENSORS} tensors")
    if metadata is None:
        raise DeltaRefusedError(f"its header is not a delta's: it has no {METADATA_KEY}")
    return places, metadata


def _metadata(value: bytes) -> Metadata:
    texts = {name: text(string) for name, string in _unique(value, STRINGS)}
    try:
        metadata = converted(texts, Metadata)
    except msgspec.ValidationError as error:
        raise DeltaRefusedError(f"its header is not a delta's: {_shown(error)}") from error
    if metadata.format != FORMAT:
        raise DeltaRefusedError(
            f"its format is {_shown(metadata.format)}, and this refitd reads {FORMAT}: publish a full version, and "
            "bring trainer and service to one version of refitd"
        )
    for what, id_ in (("base", metadata.base), ("version", metadata.version)):
        if parse_version_id(id_) is None:
            raise DeltaRefusedError(f"its {what} is {_shown(id_)!r}, which is no version's id")
    return metadata


def _rows(metadata: Metadata) -> dict[str, TensorRecord]:
    rows: dict[str, TensorRecord] = {}
    for name, value in _unique(metadata.tensors.encode()):
        if len(rows) == MAX_TENSORS:
            raise DeltaRefusedError(f"it has more than {MAX_TENSORS} tensors")
        quotes = 18 if b'"tokens"' in value else 16
        rows[name] = row = _decoded(value, TensorRecord, quotes, "its list of tensors does not parse")
        _check_row(name, row, metadata.encoding)
    return rows


def _unique(data: bytes, values: re.Pattern[bytes] = OBJECTS) -> Iterator[tuple[str, bytes]]:
    """Each key of a flat JSON object with its value. A key that comes twice is refused.

    A short one, as of some hundred tensors, is parsed at once: if what was parsed gives the same text again, no key
    came twice. Of a long one that could take gigabytes.
    """
    begin = b'"' if values is STRINGS else b"{"
    if len(data) <= _AT_ONCE and (found := _parsed_at_once(data, begin)) is not None:
        yield from found
        return
    seen: set[str] = set()
    for name, value in pairs(data, values):
        if name in seen:
            raise DeltaRefusedError("its header does not parse: a name comes twice")
        seen.add(name)
        yield name, value


def _parsed_at_once(data: bytes, begin: bytes) -> list[tuple[str, bytes]] | None:
    """None where it is no text that the writer gives, or a value begins otherwise."""
    try:
        found = [(name, bytes(value)) for name, value in json_decoder(dict[str, msgspec.Raw]).decode(data).items()]
        again = msgspec.json.encode({name: msgspec.Raw(value) for name, value in found})
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return found if again == data.rstrip(b" ") and all(value[:1] == begin for _, value in found) else None


def _decoded(value: bytes, kind: type[_KindT], quotes: int, what: str) -> _KindT:
    """A place or a record. It has so many quotes around its keys and texts, or a key comes twice: none is escaped."""
    try:
        found = from_json(value, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DeltaRefusedError(f"{what}: {_shown(error)}") from error
    if value.count(b'"') != quotes:
        raise DeltaRefusedError(f"{what}: a key comes twice")
    return found


def _check_row(name: str, row: TensorRecord, encoding: Encoding) -> None:
    if not is_tensor_name(name):
        raise DeltaRefusedError(f"{named(name)} has a name that is {NO_NAME}")
    if row.dtype not in header.BITS:
        raise DeltaRefusedError(f"{named(name)} has dtype {_shown(row.dtype)!r}, which no version has")
    is_sane = len(row.shape) <= MAX_DIMENSIONS and all(0 <= size <= MAX_SIZE for size in row.shape)
    if not is_sane or prod(row.shape) > MAX_SIZE or prod(row.shape) * header.BITS[row.dtype] % 8:
        raise DeltaRefusedError(f"{named(name)} has an impossible shape")
    elements = elements_of(row.dtype, row.shape)
    if not 0 < row.changed <= elements:
        raise DeltaRefusedError(f"{named(name)} has {row.changed} changes, of {elements}")
    least, most = (row.changed, row.changed + elements // gap.ESCAPE) if encoding is Encoding.GAP else (0, 0)
    if not least <= row.tokens <= most:
        raise DeltaRefusedError(f"{named(name)} has {row.tokens} tokens for {row.changed} changes")
    for digits in (row.base, row.result):
        if len(digits) != 16 or not _HEX.issuperset(digits):
            raise DeltaRefusedError(f"{named(name)} has a fingerprint that is not 16 hexadecimal digits")


def _check_places(
    places: Mapping[str, _Place], rows: Mapping[str, TensorRecord], metadata: Metadata, body: int
) -> None:
    """Check that the entries are exactly those of the records, and fill the `body` bytes of data without a hole."""
    expected = {DIGEST: (DIGEST_ENTRY.dtype, DIGEST_ENTRY.shape)}
    for name, row in rows.items():
        expected |= _expected(name, row, places, metadata)
    if expected.keys() != places.keys():
        odd = named(min(expected.keys() ^ places.keys()))
        raise DeltaRefusedError(f"it has other data than its list of tensors says: {odd}")
    reached = 0
    for name, place in sorted(places.items(), key=lambda item: item[1].data_offsets):
        dtype, shape = expected[name]
        if (place.dtype, place.shape) != (dtype, shape):
            raise DeltaRefusedError(f"{named(name)} is {_shown(place)}, and should be {dtype} of shape {list(shape)}")
        if place.data_offsets != (reached, reached + Entry(name=name, dtype=dtype, shape=shape).nbytes):
            raise DeltaRefusedError(f"{named(name)} lies where it leaves a hole, or over other data")
        reached = place.data_offsets[1]
    if reached != body or places[DIGEST].data_offsets[1] != body:
        raise DeltaRefusedError(f"its header speaks of {reached} bytes of data with a digest at the end; it has {body}")


def _expected(
    name: str, row: TensorRecord, places: Mapping[str, _Place], metadata: Metadata
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of a tensor's two entries."""
    indices, values = INDICES + name, VALUES + name
    width = width_of(row.dtype)
    value_type = row.dtype if header.BITS[row.dtype] == 8 * width else UNSIGNED[width]
    is_gap = metadata.encoding is Encoding.GAP
    index_dtype = "U16" if is_gap else UNSIGNED[index_type(elements_of(row.dtype, row.shape))().itemsize]
    count = row.tokens if is_gap else row.changed
    if metadata.compression is Compression.ZSTD:  # only the data knows how long it is
        unpacked = {indices: count * _WIDTHS[index_dtype], values: row.changed * width}
        return {each: ("U8", (_packed_length(each, places, size),)) for each, size in unpacked.items()}
    return {indices: (index_dtype, (count,)), values: (value_type, (row.changed,))}


def _packed_length(name: str, places: Mapping[str, _Place], unpacked: int) -> int:
    """The length of compressed data that takes `unpacked` bytes without compression."""
    place = places.get(name)
    if place is None or len(place.shape) != 1 or place.shape[0] < 0:
        raise DeltaRefusedError(f"{named(name)} is not there, or is no row of bytes")
    if unpacked > MAX_UNPACKED_BYTES:
        raise DeltaRefusedError(
            f"{named(name)} takes {unpacked} bytes unpacked; of compressed data at most {MAX_UNPACKED_BYTES} are "
            "unpacked at a time: publish in full, or without compression"
        )
    if place.shape[0] > packed_bytes(unpacked):
        raise DeltaRefusedError(f"{named(name)} has {place.shape[0]} compressed bytes for {unpacked}")
    return place.shape[0]


def _shown(what: object) -> str:
    """Foreign text in a message: one line of it at most, and no control characters that a terminal would obey."""
    return ascii(str(what)[:_SHOWN])[1:-1]
