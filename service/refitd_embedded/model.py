"""The decoder: Qwen2 or Llama as a plain `torch.nn.Module` with Hugging Face's parameter names.

One class serves two uses. A trainer calls `decoder(input_ids)` and gets logits with autograd, no cache involved. The
engine runs the same layers with another `Attend`: the one place where a key-value cache comes in (see `cache`).
Each operation, its order and its precision follow transformers' implementation (norms in float32, rotary angles in
float32 and then rounded), so that greedy answers are equal token for token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from refitd_embedded.config import DecoderConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) → attention output. Queries are [batch, heads, time, head_dim], keys and values
[batch, kv_heads, time, head_dim] of the new tokens alone; the output has the queries' shape."""


def attend_causally(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention among the given tokens, each looking at itself and those before it. See `Attend` for the shapes."""
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)


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

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.o_bias)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[batch, time, hidden] → the same.

        Args:
            hidden: the layer's normed input.
            turn: (cos, sin) of the positions.
            attend: computes the attention, with a key-value cache or without.
        """
        queries, keys, values = (
            part(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(self.layer, rotate(queries, turn), rotate(keys, turn), values)
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

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[batch, time, hidden] → the same. Arguments are those of `Attention.forward`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Trunk(nn.Module):
    """Everything below the output head. Named `model` in the decoder, because checkpoints say so."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
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
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.logits(self.hidden(input_ids, positions, attend_causally))

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [batch, time, hidden], normed.

        Args:
            input_ids: [batch, time].
            positions: [time] or [batch, time].
            attend: computes the attention, with a key-value cache or without.
        """
        hidden = self.model.embed_tokens(input_ids)
        turn = self._turn(positions, hidden.dtype)
        for layer in self.model.layers:
            hidden = layer(hidden, turn, attend)
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

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self._frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        if angles.dim() == 3:
            angles = angles[:, None]  # one more for the heads
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs (i, i + half) of each head by its position's angles."""
    cos, sin = turn
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
