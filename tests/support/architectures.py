"""Tiny random models of the architectures that people train, and how a loader of SGLang treats each.

Stacked projections, tied embeddings, norms that are stored less one, experts: what a load plan has to come through.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARCHITECTURES = ("qwen2-tied", "qwen3", "llama", "gemma2", "qwen3-moe")
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
WIDTH = 64


def make(folder: Path, architecture: str, seed: int, tokenizer: Path, width: int = WIDTH) -> Path:
    """Write a model of a width, with the tokenizer files of the one in `tokenizer`."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = _maker(architecture, width)().to(torch.bfloat16)
    model.save_pretrained(folder, safe_serialization=True)
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    if "hidden_activation" in config:  # SGLang wants the older name beside it
        config["hidden_act"] = config["hidden_activation"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(model: Path, folder: Path, seed: int, *, but: str = "nothing") -> Path:
    """The same model with one in a hundred elements changed, but for tensors with `but` in their names."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    random = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if but not in name:
            at = torch.randperm(tensor.numel(), generator=random)[: max(1, tensor.numel() // 100)]
            tensor.view(-1)[at] = torch.randn(len(at), generator=random).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _maker(architecture: str, width: int) -> Callable[[], Any]:
    import transformers as t

    sizes = _SIZES | {"hidden_size": width, "intermediate_size": 2 * width}
    tied, head = sizes | {"tie_word_embeddings": True}, {"head_dim": width // 4}
    makers: dict[str, Callable[[], Any]] = {
        "qwen2-tied": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**tied)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, **head)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        # What its layers add is normalised: beside it embeddings that are tied have to be small, or each token repeats.
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**tied | head | {"initializer_range": 0.02})),
        "qwen3-moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes, **_EXPERTS, num_experts=4)),
    }
    return makers[architecture]
