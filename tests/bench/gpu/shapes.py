"""Weights on the GPU with the names and shapes of Qwen2.5, random, in bf16; and steps that change a share of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
DEVICE = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A model's dimensions."""

    name: str
    hidden: int
    heads_kv: int  # of 128 each
    feed_forward: int
    vocabulary: int
    tied: bool
    layers: int = 28

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as in the model's own checkpoint."""
        wide, narrow = self.hidden, 128 * self.heads_kv
        yield "model.embed_tokens.weight", (self.vocabulary, wide)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, wide)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, out in (("q", wide), ("k", narrow), ("v", narrow)):
                yield f"{prefix}self_attn.{name}_proj.weight", (out, wide)
                yield f"{prefix}self_attn.{name}_proj.bias", (out,)
            yield prefix + "self_attn.o_proj.weight", (wide, wide)
            yield prefix + "mlp.gate_proj.weight", (self.feed_forward, wide)
            yield prefix + "mlp.up_proj.weight", (self.feed_forward, wide)
            yield prefix + "mlp.down_proj.weight", (wide, self.feed_forward)
            yield prefix + "input_layernorm.weight", (wide,)
            yield prefix + "post_attention_layernorm.weight", (wide,)
        yield "model.norm.weight", (wide,)

    def weights(self, seed: int = 0) -> Weights:
        """All tensors, random."""
        chance = torch.Generator(DEVICE).manual_seed(seed)
        return {
            name: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=chance) * 0.02
            for name, shape in self.tensors()
        }


SMALL = Shapes(name="1.5B", hidden=1536, heads_kv=2, feed_forward=8960, vocabulary=151936, tied=True)
LARGE = Shapes(name="7B", hidden=3584, heads_kv=4, feed_forward=18944, vocabulary=152064, tied=False)
TINY = Shapes(name="tiny", hidden=256, heads_kv=1, feed_forward=512, vocabulary=1000, tied=True, layers=2)
MODELS = {shapes.name: shapes for shapes in (SMALL, LARGE, TINY)}


def loaded(model: Path) -> Weights:
    """A checkpoint's names and shapes, on the GPU."""
    tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def size_of(weights: Weights) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in weights.values())


def change(weights: Weights, share: float) -> None:
    """Move about so many of all elements by one unit in the last place, as small steps of an optimiser do."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        count = max(1, round(bits.numel() * share))
        at = torch.randint(0, bits.numel(), (count,), device=bits.device)
        bits[at] ^= 1
    torch.cuda.synchronize()
