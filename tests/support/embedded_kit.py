"""Tiny random checkpoints and engines for the tests of refitd_embedded."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from refitd_embedded.engine import EmbeddedEngine, EngineOptions
from refitd_embedded.model import Decoder, DecoderConfig
from refitd_embedded.runner import GenerationRequest, SamplingParams

SIZES: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "eos_token_id": None,
    "dtype": "float32",
}
PROMPT = [5, 6, 7]
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"

Tensors = dict[str, torch.Tensor]


def random_tensors(seed: int, **changes: Any) -> Tensors:
    """Weights that answer differently for each seed, from the first token on."""
    torch.manual_seed(seed)
    decoder = Decoder(DecoderConfig.from_hf(SIZES | changes)).initialise(std=0.2)
    return {name: tensor.detach().clone() for name, tensor in decoder.named_parameters()}


def write(directory: Path, tensors: Tensors, *, shards: int = 1, **changes: Any) -> Path:
    """A checkpoint as Hugging Face writes it: one file, or several and an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(SIZES | changes))
    if shards == 1:
        safetensors.torch.save_file(tensors, directory / "model.safetensors")
        return directory
    names, places = sorted(tensors), {}
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        safetensors.torch.save_file({name: tensors[name] for name in part}, directory / shard)
        places |= dict.fromkeys(part, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def checkpoint(directory: Path, seed: int, **changes: Any) -> Path:
    """A good checkpoint with the weights of `seed`."""
    return write(directory, random_tensors(seed, **changes), **changes)


def ask(
    rid: str = "r", *, prompt: list[int] | None = None, tokens: int = 20, stream: bool = False
) -> GenerationRequest:
    """A greedy request."""
    params = SamplingParams.parse({"max_new_tokens": tokens, "temperature": 0})
    return GenerationRequest(rid=rid, prompt=prompt or PROMPT, params=params, return_logprob=True, stream=stream)


async def answer(engine: EmbeddedEngine, request: GenerationRequest) -> GenerationRequest:
    """The request, when it has ended."""
    async with engine.admitted([request]) as progress:
        await progress.done()
    return request


async def until_tokens(engine: EmbeddedEngine, request: GenerationRequest, tokens: int) -> None:
    """Wait until a request that somebody admitted has so many tokens."""
    await engine.scheduler.stepped.until(lambda: len(request.output) >= tokens)


def open_engine(directory: Path, **options: Any) -> EmbeddedEngine:
    """An engine on a checkpoint."""
    return EmbeddedEngine.open(directory, EngineOptions(**options))
