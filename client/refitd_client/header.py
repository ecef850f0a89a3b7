"""The header of a safetensors file (https://github.com/huggingface/safetensors, "Format"): written and read.

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {"__metadata__": {"format": "pt"}, "w":{"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    the rest   the tensors, one after the other, offsets counted from here, no gaps

The JSON is padded with spaces to a multiple of 8 and the largest element types come first, so that each tensor is
aligned to its type in a mapped file. The `safetensors` library does the same, but wants all tensors in host memory
at once; one pass that copies, digests and writes needs one tensor.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from refitd_client.contract.manifest import TensorsSummary
from refitd_client.contract.shard import MAX_HEADER_BYTES
from refitd_client.contract.slot import ShardLayout
from refitd_client.errors import InvalidWeightsError
from refitd_client.source_file import opened

METADATA_KEY = "__metadata__"

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of one element of each dtype that a version may hold. No engine loads complex numbers as weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file, without its bytes. `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return prod(self.shape) * BITS[self.dtype] // 8


class _Location(msgspec.Struct, gc=False):  # hundreds of them have Python collect garbage
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def file_order(entry: Entry) -> tuple[int, str]:
    """The sort key by which tensors lie in a file."""
    return -BITS[entry.dtype], entry.name


def encode(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes before the tensors, which follow in the order given: as `encode_sized`."""
    return encode_sized(((entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in entries), metadata)


def encode_sized(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The same for names, dtypes, shapes and bytes, for those who have no `Entry` of them.

    `metadata` are texts beside `format`, which says `pt` as loaders expect, unless they say something else.

    Raises:
        InvalidWeightsError: they are too many for one header.
    """
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt", **(metadata or {})}}
    end = 0
    for name, dtype, shape, nbytes in entries:
        begin, end = end, end + nbytes
        header[name] = _Location(dtype=dtype, shape=shape, data_offsets=(begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidWeightsError(
            f"{len(header) - 1} tensors make a header of {len(text)} bytes, and none above {MAX_HEADER_BYTES} is "
            "read: set a smaller max_shard_bytes"
        )
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> list[Entry]:
    """The tensors of a file by its header, as `locate`."""
    return [entry for entry, _ in locate(path).values()]


def locate(path: Path) -> dict[str, tuple[Entry, int]]:
    """The tensors of a file by its header, held against the file's size, and the byte of the file where each begins.

    The tensors themselves are not read.

    Raises:
        InvalidWeightsError: it is cut off, still being written, or no safetensors file.
    """
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        length = int.from_bytes(file.read(8), "little")
        if size - 8 >= length > MAX_HEADER_BYTES:
            raise InvalidWeightsError(
                f"{path} has a header of {length} bytes, and none above {MAX_HEADER_BYTES} is read: "
                "save its tensors in several files"
            )
        if size < 8 or length > size - 8:
            raise InvalidWeightsError(f"{path} is cut off or no safetensors file: its header does not fit {size} bytes")
        text = file.read(length)
    return _parse(path, text, size - 8 - length)


def layout(path: Path) -> ShardLayout:
    """What a slot has to look like for a file whose header was read.

    Raises:
        InvalidWeightsError: it cannot be read.
    """
    with opened(path) as fd:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        return ShardLayout(
            name=path.name, header=os.pread(fd, 8 + min(length, MAX_HEADER_BYTES), 0), size=os.fstat(fd).st_size
        )


def summary(entries: Sequence[Entry]) -> TensorsSummary:
    """Count tensors, their bytes and their dtypes, for the manifest."""
    return TensorsSummary(
        count=len(entries),
        bytes=sum(entry.nbytes for entry in entries),
        dtypes=dict(sorted(Counter(entry.dtype for entry in entries).items())),
    )


def _parse(path: Path, text: bytes, body: int) -> dict[str, tuple[Entry, int]]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop(METADATA_KEY, None)
        located = {name: msgspec.json.decode(value, type=_Location) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidWeightsError(
            f"{path} is damaged or no safetensors file: its header does not parse ({error})"
        ) from error
    end = max((location.data_offsets[1] for location in located.values()), default=0)
    if end != body:
        raise InvalidWeightsError(
            f"{path} is cut off or still being written: its header speaks of {end} bytes of tensors, and it has {body}"
        )
    start = 8 + len(text)
    return {
        name: (_entry(path, name, location), start + location.data_offsets[0]) for name, location in located.items()
    }


def _entry(path: Path, name: str, location: _Location) -> Entry:
    if location.dtype not in BITS:
        raise InvalidWeightsError(
            f"tensor {name} in {path} has dtype {location.dtype}, which cannot be served", tensor=name
        )
    entry = Entry(name=name, dtype=location.dtype, shape=location.shape)
    begin, end = location.data_offsets
    if entry.nbytes != end - begin:
        raise InvalidWeightsError(
            f"{path} is damaged: tensor {name} of shape {list(entry.shape)} and dtype {entry.dtype} takes "
            f"{entry.nbytes} bytes, and its header gives it {end - begin}",
            tensor=name,
        )
    return entry
