"""What a decoder is made of, read from the `config.json` that Hugging Face writes. No torch in here.

Two families are known, Qwen2 and Llama; they differ only in where biases sit. What the model code does not do (sliding
windows, other activations, stretched rotary embeddings) is refused by name rather than computed wrongly.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2", "llama")
DTYPES = ("float32", "bfloat16", "float16")


class UnsupportedModelError(ValueError):
    """The configuration asks for something that this engine does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder. Field names are Hugging Face's where it has one."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DecoderConfig":
        """Read a `config.json`. Raises UnsupportedModelError for what this engine cannot compute, KeyError for a
        size that is missing.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModelError(f"model_type {family!r} is not supported: {' and '.join(FAMILIES)} are")
        _refuse_the_unsupported(config)
        # Newer transformers write `dtype`, older ones `torch_dtype`.
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype {dtype!r} is not supported: {', '.join(DTYPES)} are")
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            rope_theta=_rope_theta(config),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family == "llama" and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            dtype=dtype,
            eos_token_ids=eos_ids(config),
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The raw `config.json` of a checkpoint. Raises OSError or ValueError."""
    return json.loads((directory / "config.json").read_bytes())


def read_eos_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence ids of `config.json` and `generation_config.json` together, as SGLang takes them."""
    found = eos_ids(read_config(directory))
    generation = directory / "generation_config.json"
    return found | eos_ids(json.loads(generation.read_bytes())) if generation.exists() else found


def eos_ids(config: dict[str, Any]) -> frozenset[int]:
    """`eos_token_id` as a set: Hugging Face writes one number, a list, or null."""
    match config.get("eos_token_id"):
        case None:
            return frozenset()
        case list() as several:
            return frozenset(several)
        case one:
            return frozenset((one,))


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary embedding, in the new form (`rope_parameters`) or the old one (beside `rope_scaling`)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported: default is")
    return float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _refuse_the_unsupported(config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported: silu is")
    windows = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if config.get("use_sliding_window") or windows:
        raise UnsupportedModelError("sliding-window attention is not supported: full attention is")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised checkpoints are not supported: float32, bfloat16 and float16 are")
