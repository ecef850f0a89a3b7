"""The header of a delta's file, `weights.refit-delta`, and its checks. docs/delta-format.md specifies the file.

The file is a safetensors file in all but its name, so any safetensors library reads it and no engine takes it for a
checkpoint. For a tensor `w` that changed there are `indices:w` and `values:w`; its dtype, shape and fingerprints are in
the metadata. The last 16 bytes, tensor `digest`, are the digest of all bytes before them, by blocks as in manifests.

A header from an untrusted writer is checked before a byte of the data is read: against the file's size, and its counts
against the tensors' shapes. So readers know how much memory each part takes before they take any. Names and records are
parsed one after another: a header takes a few times its own size in memory and never more.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeVar

import msgspec

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import METADATA_KEY, OBJECTS, STRINGS, Entry, PairsRefusedError, pairs, text
from refitd_client.contract.decoding import converted, from_json, json_decoder
from refitd_client.contract.naming import NO_NAME, is_tensor_name, parse_version_id
from refitd_client.delta.change import DeltaRefusedError, elements_of, index_type
from refitd_client.files.plain_file import read_at
from refitd_client.fingerprint import width_of

FORMAT = "refit-delta/2"
ENCODING = "flat"  # indices as they are
COMPRESSION = "none"
INDICES, VALUES, DIGEST = "indices:", "values:", "digest"
DIGEST_ENTRY = Entry(name=DIGEST, dtype="U8", shape=(16,))
DIGEST_BYTES = DIGEST_ENTRY.nbytes
UNSIGNED = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 100_000
_MAX_ELEMENTS = 2**62
_MAX_DIMENSIONS = 32
_FINGERPRINTS = re.compile(r"[0-9a-f]{16} [0-9a-f]{16}")
_JSON_AT_ONCE = 2**20  # bytes of JSON: at most some hundred thousand keys, 40 MB
_FOREIGN_SHOWN = 100  # characters of foreign text that an error message repeats

_KindT = TypeVar("_KindT")


class TensorRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    changed: int
    base: str
    result: str


class Metadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`__metadata__`: texts only, as safetensors requires. `tensors` is JSON, name → `TensorRecord`."""

    format: str
    base: str
    version: str
    encoding: str
    compression: str
    tensors: str


class _Place(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Described(msgspec.Struct, gc=False):
    metadata: msgspec.Raw = msgspec.field(name=METADATA_KEY)


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
        return self.metadata.version

    @property
    def memory(self) -> int:
        """Bytes that all indices and values take once they are decoded."""
        return sum(row.changed * bytes_of_change(row.dtype, row.shape) for row in self.rows.values())


def bytes_of_change(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of the index and the value of one changed element of a tensor."""
    return index_type(elements_of(dtype, shape))().itemsize + width_of(dtype)


def read_head(fd: int) -> Head:
    """Read and check the header of an open file. No other part of the file is read. Raises DeltaRefusedError: it breaks
    a rule. The message is a sentence about "it", the file; OSError: it cannot be read.
    """
    size = os.fstat(fd).st_size
    return _parse(read_at(fd, _header_length(read_at(fd, min(8, size), 0), size), 8), size)


def head_in(view: memoryview) -> Head:
    """As `read_head`, of a file in memory."""
    length = _header_length(bytes(view[:8]), len(view))
    return _parse(bytes(view[8 : 8 + length]), len(view))


def named(name: str) -> str:
    return f"tensor {name[:_FOREIGN_SHOWN]!a}"


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
    _check_places(places, rows, size - begin)
    found = ((name, place.data_offsets) for name, place in places.items())
    spans = {name: (begin + first, begin + end) for name, (first, end) in found}
    return Head(metadata=metadata, rows=rows, places=spans, source=data, size=size)


def _places(data: bytes) -> tuple[dict[str, _Place], Metadata]:
    if len(data) <= _JSON_AT_ONCE and (found := _places_at_once(data)) is not None:
        return found
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


def _places_at_once(data: bytes) -> tuple[dict[str, _Place], Metadata] | None:
    """None where the text is not as the writer gives it: the metadata first, and no key twice."""
    try:
        metadata = bytes(from_json(data, _Described).metadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    begin = b'{"' + METADATA_KEY.encode() + b'":' + metadata + b","
    places = _typed_at_once(b"{" + data[len(begin) :], _Place) if data.startswith(begin) else None
    if places is None or METADATA_KEY in places or metadata[:1] != b"{":
        return None
    return places, _metadata(metadata)


def _typed_at_once(data: bytes, kind: type[_KindT]) -> dict[str, _KindT] | None:
    """The values of a short text, parsed together: a long one could take gigabytes. None where encoding them does not
    give the same text again, as when a key comes twice.
    """
    try:
        found = json_decoder(dict[str, kind]).decode(data)
        return found if msgspec.json.encode(found) == data.rstrip(b" ") else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _metadata(value: bytes) -> Metadata:
    texts = _typed_at_once(value, str) if len(value) <= _JSON_AT_ONCE else None
    if texts is None:
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
    if (metadata.encoding, metadata.compression) != (ENCODING, COMPRESSION):
        written = f"{_shown(metadata.encoding)} and compression {_shown(metadata.compression)}"
        raise DeltaRefusedError(
            f"its indices are written as {written}, and this refitd reads {ENCODING} and {COMPRESSION}, as it writes "
            "them: publish a full version"
        )
    for what, id_ in (("base", metadata.base), ("version", metadata.version)):
        if parse_version_id(id_) is None:
            raise DeltaRefusedError(f"its {what} is {_shown(id_)!r}, which is no version's id")
    return metadata


def _rows(metadata: Metadata) -> dict[str, TensorRecord]:
    data = metadata.tensors.encode()
    if len(data) <= _JSON_AT_ONCE and (found := _typed_at_once(data, TensorRecord)) is not None:
        for name, row in found.items():
            _check_row(name, row)
        return found
    rows: dict[str, TensorRecord] = {}
    for name, value in _unique(data):
        if len(rows) == MAX_TENSORS:
            raise DeltaRefusedError(f"it has more than {MAX_TENSORS} tensors")
        rows[name] = row = _decoded(value, TensorRecord, 16, "its list of tensors does not parse")
        _check_row(name, row)
    return rows


def _unique(data: bytes, values: re.Pattern[bytes] = OBJECTS) -> Iterator[tuple[str, bytes]]:
    """Each key of a flat JSON object with its value. A key that comes twice is refused."""
    seen: set[str] = set()
    for name, value in pairs(data, values):
        if name in seen:
            raise DeltaRefusedError("its header does not parse: a name comes twice")
        seen.add(name)
        yield name, value


def _decoded(value: bytes, kind: type[_KindT], quotes: int, what: str) -> _KindT:
    """A place or a record. It has so many quotes around its keys and texts, or a key comes twice: none is escaped."""
    try:
        found = from_json(value, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DeltaRefusedError(f"{what}: {_shown(error)}") from error
    if value.count(b'"') != quotes:
        raise DeltaRefusedError(f"{what}: a key comes twice")
    return found


def _check_row(name: str, row: TensorRecord) -> None:
    if not is_tensor_name(name):
        raise DeltaRefusedError(f"{named(name)} has a name that is {NO_NAME}")
    if row.dtype not in header.BITS:
        raise DeltaRefusedError(f"{named(name)} has dtype {_shown(row.dtype)!r}, which no version has")
    if len(row.shape) > _MAX_DIMENSIONS or not _is_possible(row.dtype, row.shape):
        raise DeltaRefusedError(f"{named(name)} has an impossible shape")
    elements = elements_of(row.dtype, row.shape)
    if not 0 < row.changed <= elements:
        raise DeltaRefusedError(f"{named(name)} has {row.changed} changes, of {elements}")
    if _FINGERPRINTS.fullmatch(f"{row.base} {row.result}") is None:
        raise DeltaRefusedError(f"{named(name)} has a fingerprint that is not 16 hexadecimal digits")


@lru_cache(1024)  # a model's tensors have few shapes; a foreign one is as short as these
def _is_possible(dtype: str, shape: tuple[int, ...]) -> bool:
    if not all(0 <= size <= _MAX_ELEMENTS for size in shape):
        return False
    return prod(shape) <= _MAX_ELEMENTS and not prod(shape) * header.BITS[dtype] % 8


def _check_places(places: Mapping[str, _Place], rows: Mapping[str, TensorRecord], body: int) -> None:
    """Check that the entries are exactly those of the records, and fill the `body` bytes of data without a hole."""
    expected = {DIGEST: (DIGEST_ENTRY.dtype, DIGEST_BYTES)}
    for name, row in rows.items():
        index_dtype, value_dtype = _entry_types(row.dtype, row.shape)
        expected[INDICES + name], expected[VALUES + name] = (index_dtype, row.changed), (value_dtype, row.changed)
    if expected.keys() != places.keys():
        odd = named(min(expected.keys() ^ places.keys()))
        raise DeltaRefusedError(f"it has other data than its list of tensors says: {odd}")
    reached = 0
    for begin, end, name in sorted([(*place.data_offsets, name) for name, place in places.items()]):
        (dtype, count), place = expected[name], places[name]
        if place.dtype != dtype or place.shape != (count,):
            raise DeltaRefusedError(f"{named(name)} is {_shown(place)}, and should be {dtype} of shape {[count]}")
        if begin != reached or end != reached + count * header.BITS[dtype] // 8:
            raise DeltaRefusedError(f"{named(name)} lies where it leaves a hole, or over other data")
        reached = end
    if reached != body or places[DIGEST].data_offsets[1] != body:
        raise DeltaRefusedError(f"its header speaks of {reached} bytes of data with a digest at the end; it has {body}")


@lru_cache(1024)
def _entry_types(dtype: str, shape: tuple[int, ...]) -> tuple[str, str]:
    width = width_of(dtype)
    index_dtype = UNSIGNED[index_type(elements_of(dtype, shape))().itemsize]
    return index_dtype, dtype if header.BITS[dtype] == 8 * width else UNSIGNED[width]


def _shown(what: object) -> str:
    """Foreign text in a message: one line of it at most, and no control characters that a terminal would obey."""
    return ascii(str(what)[:_FOREIGN_SHOWN])[1:-1]
