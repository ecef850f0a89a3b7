"""Three updates as slime and miles write them, with the hook called as they call it.

    REFITD_ROOT=ROOT REFITD_RUN=RUN REFITD_URL=SERVICE_URL python examples/slime/updates.py xor|overwrite MODEL [FOLDER]

slime wants Megatron and GPUs, so this stands in for it: the files are those of its `UpdateWeightFromDiskDelta`.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from refit_hook import publish  # what slime imports by --custom-update-weight-post-write-path
from safetensors.numpy import save_file
from safetensors.torch import load_file

encoding, model = sys.argv[1], Path(sys.argv[2])
folder = Path(sys.argv[3] if len(sys.argv) > 3 else "build/slime")
args = Namespace(hf_checkpoint=str(model))


def write(number: int, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Path:
    """Write the delta between two state dicts."""
    changes, checksums = {}, {}
    for name, tensor in after.items():
        old, new = (each.reshape(-1).view(torch.uint8).numpy() for each in (before[name], tensor))
        where = np.flatnonzero(old != new).astype("<u4")
        if where.size:
            parts = [np.array([where.size], "<u4").view(np.uint8), where.view(np.uint8), new[where]]
            diff = new ^ old if encoding == "xor" else np.concatenate(parts)
            changes[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(diff.tobytes()), np.uint8)
            checksums[name] = xxhash.xxh3_128_hexdigest(new)
    place = folder / f"weight_v{number:06d}"
    place.mkdir(parents=True, exist_ok=True)
    file = "model-00000-of-00001.safetensors"
    save_file(changes, place / file, metadata=checksums)
    facts = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": facts, "weight_map": dict.fromkeys(changes, file)}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


weights = load_file(model / "model.safetensors")
publish(args, str(folder), [])  # slime has emptied the folder: its first update captures the base
for step in (1, 2, 3):
    torch.manual_seed(step)
    newer = {name: tensor + (torch.rand_like(tensor) < 0.01) * 0.05 for name, tensor in weights.items()}
    publish(args, str(write(step, weights, newer)), [])
    weights = newer
print("updated", step)
