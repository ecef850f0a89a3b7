"""Small checkpoints on disk, byte by byte: of any dtype, and such as no library would write."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from refitd_client.checkpoint.header import ALL_BITS as BITS
from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME

Spec = tuple[str, Sequence[int], bytes]  # dtype, shape, data

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def bf16(*shape: int, value: int = 0x3F80) -> Spec:
    """A BF16 tensor full of one bit pattern (1.0 by default)."""
    return "BF16", shape, np.full(shape, value, "<u2").tobytes()


def f32(*shape: int) -> Spec:
    """An F32 tensor of ones."""
    return "F32", shape, np.ones(shape, "<f4").tobytes()


def model() -> dict[str, Spec]:
    """A model of three tensors."""
    return {EMBED: bf16(8, 4), NORM: bf16(4), HEAD: bf16(8, 4)}


def raw(header: bytes, data: bytes = b"") -> bytes:
    """A file with any header."""
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: str = "U8", shape: Sequence[int] = (2,), start: int = 0, end: int | None = None) -> dict[str, Any]:
    """What a header says of a tensor; the right `end` unless one is given."""
    size = int(np.prod(shape, dtype=object)) * BITS.get(dtype, 8) // 8
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size if end is None else end]}


def safetensors(tensors: Mapping[str, Spec]) -> bytes:
    """A file that is right."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, part) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    return raw(json.dumps(header).encode(), data)


def one_file(folder: Path, tensors: Mapping[str, Spec]) -> Path:
    """A folder with model.safetensors and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    return folder


def sharded(folder: Path, *shards: Mapping[str, Spec]) -> Path:
    """A folder with a file for each shard, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        (folder / name).write_bytes(safetensors(shard))
        weight_map |= dict.fromkeys(shard, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def shard_name(number: int, count: int) -> str:
    """model-00001-of-00002.safetensors"""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def manifest_for(folder: Path, tensors: Mapping[str, Spec], **fields: Any) -> Manifest:
    """Write the manifest that a publisher would write for what is in the folder."""
    files = {
        file.name: ManifestFile(size=file.stat().st_size, digest=f"xxh3:{xxhash.xxh3_128_hexdigest(file.read_bytes())}")
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST_NAME
    }
    dtypes = [dtype for dtype, _, _ in tensors.values()]
    summary = TensorsSummary(
        count=len(tensors),
        bytes=sum(len(data) for _, _, data in tensors.values()),
        dtypes={dtype: dtypes.count(dtype) for dtype in dtypes},
    )
    defaults: dict[str, Any] = {"run": "run", "generation": 1, "step": 1, "files": files, "tensors": summary}
    manifest = Manifest(created_at="2026-01-01T00:00:00Z", **(defaults | fields))
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return manifest
