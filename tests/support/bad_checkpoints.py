"""The checkpoints of `tests/sglang/make-bad` that no engine may ever hear of, and how they come into a root."""

import json
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import MANIFEST_NAME, Order, version_folder

DOWN_PROJ = r"model\.layers\.1\.mlp\.down_proj\.weight"

# What the reason of a rejection says, by variant: the file, or the tensor, that is wrong.
REASONS = {
    "bad_empty": r"no \*\.safetensors file",
    "bad_shard2_gone": r"model-00002-of-00002\.safetensors",
    "bad_shape": rf"{DOWN_PROJ}.*BF16 \[64, 100\].*\[(64, 128|128, 256)\]",
    "bad_shape_norm": r"model\.norm\.weight.*\[32\].*\[(64|128)\]",
    "bad_missing": rf"{DOWN_PROJ}.*missing",
    "bad_extra": r"model\.layers\.1\.mlp\.bogus\.weight",
    "bad_trunc": r"model\.safetensors",
    "bad_shard2_trunc": r"model-00002-of-00002\.safetensors",
    "bad_garbage": r"model\.safetensors",
    "bad_nan": r"model\.norm\.weight.*NaN|NaN.*model\.norm\.weight",
    "b_fp32": r"F32.*BF16",
    "b_only_lm_head": r"missing",
}


def place(root: Path, run: str, step: int, model: Path, *, manifest: bool = False) -> Path:
    """Put a checkpoint where a version belongs, whole, by one rename; with a manifest that says what is there."""
    order = Order(1, step)
    staged = shutil.copytree(model, root.parent / "staged" / version_folder(order))
    if manifest:
        (staged / MANIFEST_NAME).write_bytes(_manifest(staged, run, order).to_json())
    return staged.rename(root / run / version_folder(order))


def _manifest(folder: Path, run: str, order: Order) -> Manifest:
    files = {path.name: ManifestFile(size=path.stat().st_size, digest=_digest(path)) for path in folder.iterdir()}
    tensors = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _tensors(path)]
    return Manifest(
        run=run,
        generation=order.generation,
        step=order.step,
        files=files,
        tensors=TensorsSummary(
            count=len(tensors),
            bytes=sum(end - start for start, end in (tensor["data_offsets"] for tensor in tensors)),
            dtypes=dict(Counter(tensor["dtype"] for tensor in tensors)),
        ),
        created_at="2026-01-01T00:00:00Z",
    )


def _tensors(path: Path) -> list[dict[str, Any]]:
    """What the header says is in the file; nothing where there is none."""
    data = path.read_bytes()
    with suppress(ValueError):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return [tensor for name, tensor in header.items() if name != "__metadata__"]
    return []


def _digest(path: Path) -> str:
    return f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}"
