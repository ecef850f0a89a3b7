"""The header of a safetensors file (https://github.com/huggingface/safetensors, "Format"), written and read.

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {"__metadata__": {"format": "pt"}, "w":{"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    the rest   the tensors, one after the other, offsets counted from here, no gaps

The JSON is padded with spaces so that the tensors begin at a multiple of 64 bytes, and the largest element types come
first: each tensor is aligned to its type in a mapped file, and a GPU reads most of them 16 bytes at a time. The
`safetensors` library pads to 8, and wants all tensors in host memory at once; one pass that copies, digests and writes
needs one tensor.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from refitd_client.checkpoint import strict_header
from refitd_client.checkpoint.strict_header import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    HeaderRefusedError,
    TensorSpec,
    TornFileError,
    read_header,
)
from refitd_client.contract.naming import ShardLayout
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import opened

_LENGTH = 8  # bytes of N
_ALIGNMENT = 64  # bytes: where the tensors begin

BITS = {dtype: bits for dtype, bits in strict_header.BITS.items() if dtype not in {"C64", "F6_E2M3", "F6_E3M2"}}
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


class _Location(msgspec.Struct, gc=False):  # hundreds of tracked objects would start a garbage collection
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def file_order(entry: Entry) -> tuple[int, str]:
    """The sort key by which tensors lie in a file."""
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


def read(path: Path) -> list[Entry]:
    """The tensors of a file by its header, as `locate`."""
    return [entry for entry, _ in locate(path).values()]


def locate(path: Path) -> dict[str, tuple[Entry, int]]:
    """The tensors of a file by its header, checked with the file's size, and the byte of the file where each begins.

    The tensors themselves are not read. They come in the order in which they lie in the file.

    Raises:
        InvalidWeightsError: it is cut off, still being written, or no safetensors file.
    """
    with opened(path) as fd:
        try:
            found = read_header(fd, os.fstat(fd).st_size)
        except TornFileError as error:
            raise InvalidWeightsError(f"{path} is cut off or still being written: {error}") from error
        except HeaderRefusedError as error:
            raise InvalidWeightsError(f"{path} is damaged or no safetensors file: {error}") from error
        except OSError as error:
            raise InvalidWeightsError(f"{path} cannot be read: {error}") from error
    return {name: (_entry(path, name, spec), found.data_start + spec.start) for name, spec in found.tensors.items()}


def layout(path: Path) -> ShardLayout:
    """The file of a slot that fits a file whose header was read.

    Raises:
        InvalidWeightsError: it cannot be read.
    """
    with opened(path) as fd:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        return ShardLayout(
            name=path.name, header=os.pread(fd, 8 + min(length, MAX_HEADER_BYTES), 0), size=os.fstat(fd).st_size
        )


def _entry(path: Path, name: str, spec: TensorSpec) -> Entry:
    if spec.dtype not in BITS:
        raise InvalidWeightsError(
            f"tensor {name} in {path} has dtype {spec.dtype}, which cannot be served", tensor=name
        )
    return Entry(name=name, dtype=spec.dtype, shape=spec.shape)
