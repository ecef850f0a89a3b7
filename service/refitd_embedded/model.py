"""The decoder: Qwen2 or Llama as a plain `torch.nn.Module` with Hugging Face's parameter names, and its LoRA adapters.

A trainer calls `decoder(input_ids)` and gets logits with autograd; the engine calls the same. Each operation, its order
and its precision follow transformers' implementation (norms in float32, rotary angles in float32 and then rounded), so
that greedy answers are equal token for token.

Qwen2 and Llama differ only in where biases sit. What the model code does not do (sliding windows, other activations,
stretched rotary embeddings) is refused by name rather than computed wrongly.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

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


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and rounded before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, size] → […, size], same dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.o_bias)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, time, hidden] → the same. `turn`: (cos, sin) of the positions."""
        queries, keys, values = (
            part(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        grouped = queries.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(
            rotate(queries, turn), rotate(keys, turn), values, is_causal=True, enable_gqa=grouped
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, hidden] → […, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, time, hidden] → the same. `turn` as in `Attention.forward`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Trunk(nn.Module):
    """Everything below the output head. Named `model` in the decoder, because checkpoints say so."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. `state_dict()` has the names and shapes of a Hugging Face checkpoint; with tied
    embeddings there is no `lm_head.weight` in it, as in the files that `save_pretrained` writes.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Not a buffer: `.to(bfloat16)` would round it.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        self._frequencies = 1.0 / (config.rope_theta ** (steps / config.head_dim))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [batch, time] → logits [batch, time, vocab], in the model's dtype.

        Rows of different lengths are padded on the right with any id: what comes later is not looked at.
        """
        return self.logits(self.hidden(input_ids))

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Token ids [batch, time] → last hidden states [batch, time, hidden], normed."""
        hidden = self.model.embed_tokens(input_ids)
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        turn = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.model.layers:
            hidden = layer(hidden, turn)
        return self.model.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, hidden] → […, vocab]."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    def initialise(self, std: float = 0.02) -> "Decoder":
        """Draw fresh weights as Hugging Face does: normal with `std`, biases zero, norms one."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=std)
        return self


def rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs (i, i + half) of each head by its position's angles."""
    cos, sin = turn
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


NO_LORA = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
_DOWN_NAME = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


Adapter = dict[str, tuple[Tensor, Tensor]]
"""By linear layer: A [r, in] and B [out, r], B multiplied with the adapter's scale."""


def read_adapter(folder: Path, decoder: nn.Module) -> Adapter:
    """Read a folder as peft saves it. Blocking.

    Raises:
        OSError: a file cannot be read. SafetensorError: it is damaged.
        ValueError: it is no adapter of this model.
    """
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors, layers = load_file(folder / "adapter_model.safetensors"), dict(_linear(decoder))
    adapter: Adapter = {}
    for name, first in tensors.items():
        if (found := _DOWN_NAME.fullmatch(name)) is None:
            continue
        if (layer := layers.get(found[1])) is None:
            raise ValueError(f"the model has no linear layer {found[1]}")
        second = tensors[name.replace("lora_A", "lora_B")] * (config["lora_alpha"] / config["r"])
        adapter[found[1]] = first.to(layer.weight.dtype), second.to(layer.weight.dtype)
    return adapter


def _linear(decoder: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Linear))


class AdapterRows:
    """Which adapter each row of the next forward has. None for a row of the model alone."""

    def __init__(self, decoder: nn.Module) -> None:
        self.rows: Sequence[Adapter | None] = ()
        for name, layer in _linear(decoder):
            layer.register_forward_hook(partial(self._add, name))

    def _add(self, name: str, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for row, adapter in enumerate(self.rows):
            if adapter is not None and (pair := adapter.get(name)) is not None:
                output[row] += inputs[0][row] @ pair[0].T @ pair[1].T


class Adapters:
    """The adapters by name, with their folders. One change at a time, as in SGLang."""

    def __init__(self, decoder: nn.Module, *, enabled: bool) -> None:
        self.enabled = enabled
        self.folders: dict[str, str] = {}
        self._loaded: dict[str, Adapter] = {}
        self._decoder = decoder
        self._turn = asyncio.Lock()

    def named(self, name: Any) -> Adapter | None:
        """The adapter that a request names; None where it names none. Raises ValueError for an unknown one."""
        if name is None:
            return None
        if name not in self._loaded:
            raise ValueError(f"The following requested LoRA adapters are not loaded: {name}")
        return self._loaded[name]

    async def load(self, name: str, folder: str) -> str | None:
        """Load an adapter. Returns why that failed; None where it did not."""
        if not self.enabled:
            return NO_LORA
        async with self._turn:
            if name in self.folders:
                return f"Failed to load LoRA adapter {name} from {folder}: it is already loaded"
            try:
                self._loaded[name] = await asyncio.to_thread(read_adapter, Path(folder), self._decoder)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                return f"Failed to load LoRA adapter {name} from {folder}: {error}"
            self.folders[name] = folder
            return None

    async def unload(self, name: str) -> str | None:
        """Unload an adapter. Returns why that failed; None where it did not."""
        if not self.enabled:
            return NO_LORA
        async with self._turn:
            if self.folders.pop(name, None) is None:
                return f"LoRA with name {name} does not exist. Loaded LoRAs: {set(self.folders)}"
            del self._loaded[name]
            return None
