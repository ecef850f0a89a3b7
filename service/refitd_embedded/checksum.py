"""What `/weights_checker` answers: one content hash a tensor, equal to that of a real SGLang on CPU.

SGLang fuses q, k and v (and gate and up) into one parameter each, and hashes what it has: sha256 over the bytes, the
first eight of them as sixteen hex digits. Fused tensors are stacked along the output dimension, so hashing the parts
one after the other gives the same digest, and no tensor has to be copied. (On a GPU SGLang uses another hash.)
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from refitd_embedded.model import Decoder

FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""First part → (name of the whole, all parts in order)."""
LATER_PARTS = ("k_proj", "v_proj", "up_proj")


def checksums(decoder: Decoder) -> dict[str, str]:
    """Hash every weight. Blocking."""
    return {name: _digest(parts) for name, parts in _as_sglang_has_them(decoder)}


def report(found: dict[str, str]) -> dict[str, Any]:
    """The whole answer, for one rank of one."""
    overall = hashlib.sha256("".join(name + found[name] for name in sorted(found)).encode()).hexdigest()
    place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    rank = {"checksums": found, "per_gpu_checksum": overall, "parallelism_info": [{**place, "rank": 0, "size": 1}]}
    engine = hashlib.sha256(overall.encode()).hexdigest()
    return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine}


def _as_sglang_has_them(decoder: Decoder) -> Iterator[tuple[str, list[Tensor]]]:
    tensors = dict(decoder.named_parameters())
    for name, tensor in tensors.items():
        *path, module, kind = name.split(".")
        if module in FUSED:
            whole, parts = FUSED[module]
            yield ".".join((*path, whole, kind)), [tensors[".".join((*path, part, kind))] for part in parts]
        elif module not in LATER_PARTS:
            yield name, [tensor]


def _digest(parts: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()
