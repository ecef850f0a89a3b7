"""The bounds: what the bus can do, and what everybody does."""

import os
import shutil
from pathlib import Path

import torch
from rows import Row, row, timed
from safetensors.torch import save_file
from setting import Setting
from shapes import Weights, size_of


def bus(setting: Setting) -> list[Row]:
    """The pinned copy, tensor by tensor, and `save_file` with the syncs that a publication has."""
    weights, model, folder = setting.weights, setting.model, setting.folder
    copies = pinned_copies(weights, setting.rounds)
    setting.copy_ms = sorted(copies)[len(copies) // 2]
    saves = [timed(lambda number=number: save(weights, folder / f"plain{number}")) for number in range(3)]
    for number in range(3):
        shutil.rmtree(folder / f"plain{number}")
    return [
        row("bus", model, "pinned copy", copies, note=f"{size_of(weights)} bytes"),
        row("bus", model, "save_file and syncs", saves),
    ]


def pinned_copies(weights: Weights, rounds: int) -> list[float]:
    """Milliseconds of copying all tensors to page-locked memory. The first two warm up."""
    memory = torch.empty(size_of(weights), dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        end = 0
        for tensor in weights.values():
            memory[end : end + tensor.nbytes].view(tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
            end += tensor.nbytes
        torch.cuda.synchronize()

    return [timed(copy) for _ in range(rounds + 2)][2:]


def save(weights: Weights, folder: Path) -> None:
    """A checkpoint as trainers save it, and the syncs without which a power cut takes it back."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for path in (folder / "model.safetensors", folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
