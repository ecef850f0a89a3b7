"""How a delta lies in its file, `weights.refit-delta`. docs/delta-format.md specifies it for other languages.

The file is a safetensors file in all but its name, so any safetensors library reads it and no engine takes it for a
checkpoint. For a tensor `w` that changed there are `indices:w` and `values:w`; its dtype, shape and fingerprints are in
the metadata. The last 16 bytes, tensor `digest`, are the digest of all bytes before them,
by blocks as in manifests, so that a writer digests its bytes once.
"""

from enum import StrEnum

import msgspec

from refitd_client.checkpoint.header import Entry

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
