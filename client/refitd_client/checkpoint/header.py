"""The header of a safetensors file (https://github.com/huggingface/safetensors, "Format"), written and read.

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {"__metadata__": {"format": "pt"}, "w":{"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    the rest   the tensors, one after the other, offsets counted from here, no gaps

The JSON is padded with spaces so that the tensors begin at a multiple of 64 bytes, and the largest element types come
first: each tensor is aligned to its type in a mapped file, and a GPU reads most of them 16 bytes at a time. The
`safetensors` library pads to 8, and wants all tensors in host memory at once; one pass that copies, digests and writes
needs one tensor.

It is read by the letter. What loaders accept is refused here: a name that comes twice (loaders take the last), names
with control characters, a header so large that reading it is the attack. No engine should be the first to read such a
file: the publisher reads as strictly as the service.

The versions of a run mostly have the same headers, byte for byte, and parsing them takes the interpreter. So a header
that was accepted is cached by its whole text and by how much data follows it: nothing else was checked.

A large JSON object is read pair by pair (`pairs`). A JSON parser that builds everything first can be made to take
gigabytes by a file of a few megabytes (`[{},{},{},…]`), and does not report a key that comes twice. Here one pair is
built at a time, nothing nests, and the caller counts the pairs.
"""

import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import NO_NAME, ShardLayout, is_tensor_name
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import opened, read_at

# Possessive (`++`, `*+`): no text can make these patterns go back and try again, so time is linear in its length.
_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_OPEN = re.compile(_SPACE + rb"\{" + _SPACE + rb"(\})?+")
_END = re.compile(_SPACE + rb"\Z")


class PairsRefusedError(ValueError):
    """Not a JSON object, or one whose values are not what the caller asked for."""


def _pair(value: bytes) -> re.Pattern[bytes]:
    return re.compile(
        _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + rb"(" + value + rb")" + _SPACE + rb"([,}])"
    )


STRINGS = _pair(_STRING)  # values are strings
OBJECTS = _pair(rb'(?:null|\{(?:[^{}"]++|' + _STRING + rb")*+\})")  # values are objects that hold no objects, or null


def pairs(data: bytes, pattern: re.Pattern[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield each key with the JSON text of its value, in the order of the text. Repeated keys are repeated. Raises
    PairsRefusedError where the text stops being such an object.
    """
    opening = _OPEN.match(data)
    if opening is None:
        raise PairsRefusedError("it is not a JSON object")
    position, closed = opening.end(), opening[1] is not None
    while not closed:
        match = pattern.match(data, position)
        if match is None:
            raise PairsRefusedError(f"its JSON is malformed or of the wrong form at byte {position}")
        yield text(match[1]), match[2]
        position, closed = match.end(), match[3] == b"}"
    if _END.match(data, position) is None:
        raise PairsRefusedError(f"it goes on after its JSON object ends, at byte {position}")


def text(string: bytes) -> str:
    """The text of a JSON string, which is given with its quotes. Raises PairsRefusedError if it is not UTF-8, or has an
    escape that stands for nothing.
    """
    try:
        return string[1:-1].decode() if b"\\" not in string else msgspec.json.decode(string, type=str)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise PairsRefusedError(f"it holds a string that is not valid: {error}") from error


# Publishers write no larger one. The format allows 100 MB; 200,000 tensors take 20 MB.
MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 200_000
_NAME_SHOWN = 200  # characters of a name in a sentence
MAX_METADATA_BYTES = 2**20
_MAX_ENTRY_BYTES = 4096
_LARGEST_NUMBER = 2**63 - 1  # of a file, in bytes
_QUOTES = 8  # around three keys and a dtype; more means that a key comes twice
METADATA_KEY = "__metadata__"
SCALES_END = "weight_scale_inv"
"""How the names of scales end, by which the blocks of a weight in fp8 are multiplied: float32, and above 0."""
_REMEMBERED_HEADERS = 1024  # headers
_HEADERS_BYTES = 16 * 2**20  # of their text; parsed they take two to four times as much
_PAIR_BYTES = 256  # at most, for a pair of the metadata whose text takes seven

_DTYPES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "I64 U64 F64 C64",
}
ALL_BITS = {dtype: bits for bits, dtypes in _DTYPES.items() for dtype in dtypes.split()}  # as in safetensors 0.8
_INTERNED = {dtype: dtype for dtype in ALL_BITS}  # one string of each, instead of one for each tensor


class HeaderRefusedError(ValueError):
    """A header that is not to be trusted. The message is a sentence about "it", the file."""


class TornFileError(HeaderRefusedError):
    """The file is shorter than it says it is: a write that was cut off, or is still going on."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its safetensors dtype, its shape, and its bytes `start` (in) to `end` (out) of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a header says. Tensors are in the order of their data; the data begins at byte `data_start` of the file.

    Readers of the same header share one object.
    """

    tensors: Mapping[str, TensorSpec]
    data_start: int
    metadata: Mapping[str, str]

    @cached_property
    def stretches(self) -> list[tuple[str, bool, int, int]]:
        """Neighbours of one dtype as one: dtype, whether they are scales, bytes `start` to `end` of the data."""
        found: list[tuple[str, bool, int, int]] = []
        for name, spec in self.tensors.items():
            kind = spec.dtype, is_scales(name, spec.dtype)
            if found and (*found[-1][:2], found[-1][3]) == (*kind, spec.start):
                found[-1] = *kind, found[-1][2], spec.end
            else:
                found.append((*kind, spec.start, spec.end))
        return found


def is_scales(name: str, dtype: str) -> bool:
    return dtype == "F32" and name.endswith(SCALES_END)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache of at most `most` values, whose weights add up to at most `heaviest`. Threads may share it.

    The value that was not asked for longest is dropped first. A value that alone is heavier is not kept.
    """

    def __init__(self, most: int, heaviest: int = 0) -> None:
        self._most, self._heaviest = most, heaviest
        self._kept: dict[K, tuple[V, int]] = {}  # in the order in which they were asked for
        self._weight = 0
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                return None
            self._kept[key] = found
            return found[0]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Keep a value, in place of the one before under its key. `weight` counts against `heaviest`."""
        with self._lock:
            self._drop(key)
            if weight > self._heaviest:
                return
            self._kept[key] = value, weight
            self._weight += weight
            while len(self._kept) > self._most or self._weight > self._heaviest:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: K) -> None:
        _, weight = self._kept.pop(key, (None, 0))
        self._weight -= weight


_parsed: BoundedCache[tuple[bytes, int], Header] = BoundedCache(_REMEMBERED_HEADERS, _HEADERS_BYTES)


def read_header(fd: int, size: int) -> Header:
    """Read and check the header of an open file of `size` bytes. Takes about three times the header's own memory.

    Raises:
        HeaderRefusedError: it breaks a rule. The message names the tensor.
        TornFileError: it is shorter than it says.
        OSError: it cannot be read, or has become shorter since `size` was asked.
    """
    if size < 8:
        raise TornFileError(f"it has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(read_at(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:  # before anything is read: the length may be 2**62
        raise HeaderRefusedError(
            f"its header claims {length} bytes, more than the {MAX_HEADER_BYTES} that are read: "
            "it holds something else, or so many tensors that they belong into several files"
        )
    if 8 + length > size:
        raise TornFileError(f"it ends inside its header: {size} of {8 + length} bytes")
    data, data_bytes = read_at(fd, length, 8), size - 8 - length
    header = _parsed.get((data, data_bytes))
    if header is None:  # one that was refused is parsed, and refused, each time
        header = parse_header(data, data_bytes)
        _parsed.put((data, data_bytes), header, len(data) + _PAIR_BYTES * len(header.metadata))
    return header


def parse_header(data: bytes, data_bytes: int) -> Header:
    """Parse the JSON of a header that `data_bytes` bytes of data follow. Raises HeaderRefusedError, TornFileError as
    `read_header`.
    """
    try:
        tensors, metadata = _parse(data)
    except PairsRefusedError as error:
        raise HeaderRefusedError(f"its header cannot be read: {error}") from error
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    reached = 0
    for name, spec in tensors.items():
        if spec.start != reached:
            what = "a hole" if spec.start > reached else "other tensors"
            raise HeaderRefusedError(f"{_named(name)} begins at byte {spec.start} of the data, in or after {what}")
        reached = spec.end
    if data_bytes < reached:
        raise TornFileError(f"it has {data_bytes} of the {reached} bytes of data that its header describes")
    if data_bytes > reached:
        raise HeaderRefusedError(f"it has {data_bytes - reached} bytes after the last tensor that its header describes")
    return Header(tensors, 8 + len(data), metadata or {})


def _parse(data: bytes) -> tuple[dict[str, TensorSpec], dict[str, str] | None]:
    tensors: dict[str, TensorSpec] = {}
    metadata: dict[str, str] | None = None
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # layers repeat their shapes: keep one of each
    for name, value in pairs(data, OBJECTS):
        if name in tensors or (name == METADATA_KEY and metadata is not None):
            raise HeaderRefusedError(f"its header has {_named(name)} twice")
        if name == METADATA_KEY:
            metadata = _metadata(value)
        elif len(tensors) == MAX_TENSORS:
            raise HeaderRefusedError(f"its header has more than {MAX_TENSORS} tensors")
        else:
            spec = _spec(name, value)
            tensors[name] = TensorSpec(spec.dtype, shapes.setdefault(spec.shape, spec.shape), spec.start, spec.end)
    return tensors, metadata


def _metadata(value: bytes) -> dict[str, str]:
    if len(value) > MAX_METADATA_BYTES:
        raise HeaderRefusedError(f"its {METADATA_KEY} is larger than {MAX_METADATA_BYTES} bytes")
    metadata: dict[str, str] = {}
    if value == b"null":  # the library takes it for none, and tools of other languages write it
        return metadata
    for key, string in pairs(value, STRINGS):
        if key in metadata:
            raise HeaderRefusedError(f"its {METADATA_KEY} has {key[:_NAME_SHOWN]!a} twice")
        metadata[key] = text(string)
    return metadata


def _spec(name: str, value: bytes) -> TensorSpec:
    if not is_tensor_name(name):
        raise HeaderRefusedError(f"{_named(name)} has a name that is {NO_NAME}")
    if len(value) > _MAX_ENTRY_BYTES or value.count(b'"') != _QUOTES:
        raise HeaderRefusedError(f"{_named(name)} is described by more than a dtype, a shape and data_offsets")
    try:
        entry = from_json(value, _Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The parser's message quotes the file: no more of it than a line, and no control characters.
        quoted = ascii(str(error)[:_NAME_SHOWN])[1:-1]
        raise HeaderRefusedError(f"{_named(name)} is not described as the format asks: {quoted}") from error
    if b"-" in value:
        raise HeaderRefusedError(f"{_named(name)} has a negative number in its shape or data_offsets")
    _check_extent(name, entry)
    return TensorSpec(_INTERNED[entry.dtype], tuple(entry.shape), *entry.data_offsets)


def _check_extent(name: str, entry: _Entry) -> None:
    bits = ALL_BITS.get(entry.dtype)
    if bits is None:
        raise HeaderRefusedError(f"{_named(name)} has the dtype {entry.dtype[:32]!a}, which safetensors does not have")
    start, end = entry.data_offsets
    if max(start, end, *entry.shape) > _LARGEST_NUMBER:
        raise HeaderRefusedError(f"{_named(name)} has a number in its shape or data_offsets beyond {_LARGEST_NUMBER}")
    total = math.prod(entry.shape) * bits
    if total % 8:
        raise HeaderRefusedError(f"{_named(name)} does not fill whole bytes: {entry.dtype} {entry.shape}")
    if end - start != total // 8:
        takes = str(total // 8) if total // 8 <= _LARGEST_NUMBER else f"more than {_LARGEST_NUMBER}"
        raise HeaderRefusedError(
            f"{_named(name)} is {entry.dtype} {entry.shape}, which takes {takes} bytes, "
            f"and its data_offsets {start} to {end} hold {end - start}"
        )


def _named(name: str) -> str:
    return f"tensor {name[:_NAME_SHOWN]!a}"


_LENGTH = 8  # bytes of N
_ALIGNMENT = 64  # bytes: where the tensors begin

BITS = {dtype: bits for dtype, bits in ALL_BITS.items() if dtype not in {"C64", "F6_E2M3", "F6_E3M2"}}
"""Bits of one element of each dtype that a version may hold. No engine loads complex numbers as weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file, without its bytes. `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


class _Location(msgspec.Struct, gc=False):  # hundreds of tracked objects would start a garbage collection
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def file_order(entry: Entry) -> tuple[int, str]:
    return -BITS[entry.dtype], entry.name


def encode(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """As `encode_sized`, for entries."""
    return encode_sized(((entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in entries), metadata)


def encode_sized(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the tensors, which follow in the order given: names, dtypes, shapes and bytes.

    `metadata` are texts beside `format`, which says `pt` as loaders expect, unless they have another `format`.

    Raises:
        InvalidWeightsError: they are too many for one header.
    """
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt", **(metadata or {})}}
    end = 0
    for name, dtype, shape, nbytes in entries:
        begin, end = end, end + nbytes
        header[name] = _Location(dtype=dtype, shape=shape, data_offsets=(begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + _LENGTH) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidWeightsError(
            f"{len(header) - 1} tensors make a header of {len(text)} bytes, and none above {MAX_HEADER_BYTES} is "
            "read: set a smaller max_shard_bytes"
        )
    return len(text).to_bytes(_LENGTH, "little") + text


def locate(path: Path) -> dict[str, tuple[Entry, int]]:
    """The tensors of a file, in their order there, and the byte of the file where each begins. Raises as `read`."""
    found = read(path)
    starts = [found.data_start + spec.start for spec in found.tensors.values()]
    return {entry.name: (entry, start) for entry, start in zip(entries(path, found), starts, strict=True)}


def read(path: Path) -> Header:
    """The header of a trainer's file, held against the file's size.

    Raises:
        InvalidWeightsError: it is cut off, still being written, or no safetensors file.
    """
    with opened(path) as fd:
        try:
            return read_header(fd, os.fstat(fd).st_size)
        except TornFileError as error:
            raise InvalidWeightsError(f"{path} is cut off or still being written: {error}") from error
        except HeaderRefusedError as error:
            raise InvalidWeightsError(f"{path} is damaged or no safetensors file: {error}") from error
        except OSError as error:
            raise InvalidWeightsError(f"{path} cannot be read: {error}") from error


def entries(path: Path, header: Header) -> list[Entry]:
    """The tensors of a file whose header was read. Raises InvalidWeightsError if no engine could load one."""
    for name, spec in header.tensors.items():
        if spec.dtype not in BITS:
            text = f"tensor {name} in {path} has dtype {spec.dtype}, which cannot be served"
            raise InvalidWeightsError(text, tensor=name)
    return [Entry(name=name, dtype=spec.dtype, shape=spec.shape) for name, spec in header.tensors.items()]


def layout(path: Path) -> ShardLayout:
    """The file of a slot that fits a file whose header was read. Raises InvalidWeightsError if it cannot be read."""
    with opened(path) as fd:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        return ShardLayout(
            name=path.name, header=os.pread(fd, 8 + min(length, MAX_HEADER_BYTES), 0), size=os.fstat(fd).st_size
        )
