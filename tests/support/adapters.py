"""Small LoRA adapters, in the form in which peft saves them, and how SGLang is started to serve them on a CPU."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODULES = tuple(f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj"))

FLAGS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8"),
    *("--lora-target-modules", "q_proj", "v_proj"),
)


def write_adapter(folder: Path, model: Path, seed: int, *, rank: int = 4, **config: Any) -> Path:
    """An adapter for two linear layers of a model, large enough to change its answers."""
    random = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for module in MODULES:
        out, into = weights[f"{module}.weight"].shape
        for half, shape in (("A", (rank, into)), ("B", (out, rank))):
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = torch.randn(shape, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder
