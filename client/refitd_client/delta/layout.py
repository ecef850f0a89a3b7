"""How a delta lies in its file, `weights.refit-delta`. docs/delta-format.md specifies it for other languages.

The file is a safetensors file in all but its name, so any safetensors library reads it and no engine takes it for a
checkpoint. For a tensor `w` that changed there are `indices:w` and `values:w`; its dtype, shape and fingerprints are in
the metadata. The last 16 bytes, tensor `digest`, are the digest of all bytes before them,
by blocks as in manifests, so that a writer digests its bytes once.

A delta that goes over a network may be compressed by zstd. zstd comes with Python from 3.14 on (`compression.zstd`),
before that with the extra `wire`. Bytes are grouped by their place in the element first: sign and exponent of weights
repeat, the low bits of the mantissa do not.
"""

import importlib
import threading
from enum import StrEnum
from functools import cache
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Entry
from refitd_client.delta.change import DeltaRefusedError

FORMAT = "refit-delta/2"
INDICES, VALUES, DIGEST = "indices:", "values:", "digest"
DIGEST_ENTRY = Entry(name=DIGEST, dtype="U8", shape=(16,))

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 100_000
MAX_SIZE = 2**62
MAX_DIMENSIONS = 32

UNSIGNED = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


ENCODING = "flat"  # indices as they are


class Compression(StrEnum):
    """Whether each tensor's indices and values are compressed."""

    NONE = "none"
    ZSTD = "zstd"


class TensorRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True, gc=False):
    """One tensor in the metadata's `tensors`."""

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
    compression: Compression
    tensors: str


MAX_UNPACKED_BYTES = 2**29
"""Bytes that one tensor's indices, or its values, may take: they are always unpacked together."""

_LEVEL = 1  # these bytes are nearly random: a higher level compresses no better and takes longer


def available() -> bool:
    """Whether this process can compress and decompress."""
    return _library() is not None


def pack(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Compress an array. Raises DeltaRefusedError if zstd is missing, or the array is larger than readers unpack."""
    if array.nbytes > MAX_UNPACKED_BYTES:
        raise DeltaRefusedError(f"an array of {array.nbytes} bytes is not compressed: at most {MAX_UNPACKED_BYTES} are")
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(len(array), array.itemsize).T)
    return np.frombuffer(_required().compress(planes.reshape(-1).data), np.uint8)


def unpack(data: NDArray[np.uint8], count: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """Decompress what `pack` returned to `count` numbers of type `kind`. Takes no more memory than these, whatever the
    data claims. Raises DeltaRefusedError if the data is not such an array, or zstd is not installed.
    """
    library, size = _required(), count * kind.itemsize
    try:
        planes = library.decompress(data.tobytes(), size)
    except DeltaRefusedError:
        raise
    except Exception as error:  # each library has its own error
        raise DeltaRefusedError(f"does not decompress: {ascii(str(error)[:100])[1:-1]}") from error
    if len(planes) != size:
        raise DeltaRefusedError(f"decompresses to another size than {size} bytes")
    rows = np.frombuffer(planes, np.uint8).reshape(kind.itemsize, count)
    return np.ascontiguousarray(rows.T).reshape(-1).view(kind)


def packed_bytes(size: int) -> int:
    """How many bytes a frame of `size` bytes takes at most (ZSTD_COMPRESSBOUND, with some room)."""
    return size + size // 128 + 2**10


def _required() -> "_Zstandard | _Builtin":
    library = _library()
    if library is None:
        raise DeltaRefusedError("is compressed by zstd, which is not installed: refitd's extra 'wire' brings it")
    return library


@cache  # a failed import takes longer than compressing a small tensor, and threads take turns for it
def _library() -> "_Zstandard | _Builtin | None":
    for name, kind in (("compression.zstd", _Builtin), ("zstandard", _Zstandard)):
        try:
            return kind(importlib.import_module(name))
        except ImportError:
            continue
    return None


class _Zstandard:
    """The package `zstandard`. Each thread keeps its compressor: making one takes as long as compressing 10 KB."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = threading.local()

    def compress(self, data: memoryview) -> bytes:
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._module.ZstdCompressor(level=_LEVEL, write_checksum=False)
        return cast("bytes", self._own.compressor.compress(data))

    def decompress(self, data: bytes, size: int) -> bytes:
        if self._module.frame_content_size(data) != size:
            raise DeltaRefusedError(f"says that it decompresses to another size than {size} bytes")
        return cast("bytes", self._module.ZstdDecompressor().decompress(data, allow_extra_data=False))


class _Builtin:
    """`compression.zstd` of Python 3.14."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def compress(self, data: memoryview) -> bytes:
        return cast("bytes", self._module.compress(data, _LEVEL))

    def decompress(self, data: bytes, size: int) -> bytes:
        if self._module.get_frame_info(data).decompressed_size != size:
            raise DeltaRefusedError(f"says that it decompresses to another size than {size} bytes")
        decompressor = self._module.ZstdDecompressor()
        planes = cast("bytes", decompressor.decompress(data, max_length=size + 1))
        if not decompressor.eof or decompressor.unused_data:
            raise DeltaRefusedError("is compressed to more than one frame, or cut off")
        return planes
