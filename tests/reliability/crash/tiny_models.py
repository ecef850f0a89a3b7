"""Checkpoints of one tiny Llama, each with weights of its own: 60 KB in float32, where no two tokens tie."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS = 97, 32, 48, 2, 4
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "dtype": "float32",
    "tie_word_embeddings": False,
}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        above = f"model.layers.{layer}"
        shapes |= {f"{above}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{above}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{above}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{above}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes


def make(folder: Path, count: int) -> list[Path]:
    """Write `count` of them."""
    models = [folder / f"m{seed}" for seed in range(count)]
    for seed, model in enumerate(models):
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        chance = np.random.default_rng(seed)
        weights = {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in _shapes().items()}
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return models
