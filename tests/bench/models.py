"""A tiny model to move: 0.3 MB in bf16, in the format of a Hugging Face Qwen2 checkpoint."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

Weights = dict[str, torch.Tensor]


def make(folder: Path) -> Path:
    """Write the model that engines start with."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def steps(folder: Path, count: int) -> list[Weights]:
    """`count` different sets of weights of the model in `folder`."""
    from safetensors.torch import load_file

    base = load_file(folder / "model.safetensors")
    return [{name: tensor + 0.001 * (step + 1) for name, tensor in base.items()} for step in range(count)]
