"""Disk updates as slime and miles write them: `weight_v000012/`, full or a delta."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_weights

from refitd_client.contract.naming import INDEX_NAME

Bytes = NDArray[np.uint8]
Weights = dict[str, torch.Tensor]
FILE = "model-00000-of-00001.safetensors"


def as_bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def xor(old: Bytes, new: Bytes) -> Bytes:
    return old ^ new


def overwrite(old: Bytes, new: Bytes) -> Bytes:
    """As slime's `overwrite_encode`: a count, positions of bytes, the bytes."""
    where = np.flatnonzero(old != new).astype("<u4")
    return np.concatenate([np.array([where.size], "<u4").view(np.uint8), where.view(np.uint8), new[where]])


def write_full(folder: Path, number: int, contents: Weights) -> Path:
    place = folder / f"weight_v{number:06d}"
    place.mkdir(parents=True)
    save_weights(contents, place / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(contents, "model.safetensors")}
    (place / INDEX_NAME).write_text(json.dumps(index))
    return place


def write_delta(
    folder: Path,
    number: int,
    before: Weights,
    after: Weights,
    encode: Callable[[Bytes, Bytes], Bytes] = xor,
    *,
    checksum: str = "xxh3-128",
    **facts: str,
) -> Path:
    place = folder / f"weight_v{number:06d}"
    place.mkdir(parents=True)
    changed = {name: encode(as_bytes(before[name]), as_bytes(after[name])) for name in after}
    sums: Mapping[str, Callable[[bytes], str]] = {
        "xxh3-128": xxhash.xxh3_128_hexdigest,
        "adler32": lambda data: f"{zlib.adler32(data):08x}",
    }
    checked = {name: sums[checksum](as_bytes(after[name]).tobytes()) for name in after}
    frames = {
        name: np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data.tobytes()), np.uint8)
        for name, data in changed.items()
    }
    save_file(frames, place / FILE, metadata=checked)
    said = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encode.__name__}
    said |= {"compression_format": "zstd", "checksum_format": checksum, **facts}
    (place / INDEX_NAME).write_text(json.dumps({"metadata": said, "weight_map": dict.fromkeys(after, FILE)}))
    return place
