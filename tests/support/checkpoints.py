"""Tiny checkpoints, written with safetensors' own library, in the layouts that trainers use."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, Order, version_folder

Tensors = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


def tensors(seed: int = 0) -> Tensors:
    """Four small tensors."""
    random = np.random.default_rng(seed)
    return {f"layer.{i}.weight": random.standard_normal((4, 3)).astype(np.float32) for i in range(4)}


def write_model(folder: Path, weights: Tensors | None = None) -> Path:
    """A model directory as `save_pretrained` writes it: one file, a config, no marker of any kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "tie_word_embeddings": False}))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shards(folder: Path, weights: Tensors) -> Path:
    """Two shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def publish(root: Path, run: str, step: int, weights: Tensors, generation: int = 1) -> Path:
    """A version with its manifest, renamed into place, by way of the product's own contract and nothing else."""
    import xxhash

    order = Order(generation, step)
    incoming = write_shards(root / run / f".incoming-{step}", weights)
    files = {
        path.name: ManifestFile(
            size=path.stat().st_size, digest=f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}"
        )
        for path in incoming.iterdir()
    }
    manifest = Manifest(
        run=run,
        generation=generation,
        step=step,
        files=files,
        tensors=TensorsSummary(
            count=len(weights), bytes=sum(tensor.nbytes for tensor in weights.values()), dtypes={"F32": len(weights)}
        ),
        created_at="2026-01-01T00:00:00Z",
    )
    (incoming / MANIFEST_NAME).write_bytes(manifest.to_json())
    return incoming.rename(root / run / version_folder(order))
