"""The machine and the software of a run."""

from typing import Any

import torch

from support.run_notes import run_notes


def machine() -> dict[str, Any]:
    """What is written beside the figures."""
    notes = run_notes("torch", "triton", "numpy", "safetensors", "xxhash", "sglang")
    return notes | {"machine": {"gpu": torch.cuda.get_device_name()} | notes["machine"]}
