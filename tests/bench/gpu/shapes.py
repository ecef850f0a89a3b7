"""Weights on the GPU, and steps that change a share of them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
DEVICE = "cuda"


def loaded(model: Path) -> Weights:
    """A checkpoint's names and shapes, on the GPU."""
    tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def change(weights: Weights, share: float) -> None:
    """Move about so many of all elements by one unit in the last place, as small steps of an optimiser do."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        count = max(1, round(bits.numel() * share))
        at = torch.randint(0, bits.numel(), (count,), device=bits.device)
        bits[at] ^= 1
    torch.cuda.synchronize()
