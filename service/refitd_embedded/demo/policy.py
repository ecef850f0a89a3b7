"""The policy: a Qwen2 decoder of 400,000 parameters, and the checkpoint that everybody starts from.

    python -m refitd_embedded.demo.policy --out DIR --seed 0

writes `config.json` and `model.safetensors` as Hugging Face does; transformers and SGLang read them.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from refitd_embedded.config import DecoderConfig
from refitd_embedded.demo.task import VOCABULARY
from refitd_embedded.model import Decoder

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def fresh(seed: int) -> Decoder:
    """A decoder with weights drawn from `seed`, whatever torch's own generator stands at."""
    decoder = Decoder(DecoderConfig.from_hf(CONFIG))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return decoder.initialise()


def write(decoder: Decoder, directory: Path) -> Path:
    """Write a checkpoint and return its folder. The configuration comes last: where it is, the weights are whole."""
    directory.mkdir(parents=True, exist_ok=True)
    weights, config = directory / "model.safetensors", directory / "config.json"
    tensors = {name: tensor.contiguous() for name, tensor in decoder.state_dict().items()}
    safetensors.torch.save_file(tensors, f"{weights}.unfinished", metadata={"format": "pt"})
    Path(f"{weights}.unfinished").replace(weights)
    Path(f"{config}.unfinished").write_text(json.dumps(CONFIG, indent=2) + "\n")
    Path(f"{config}.unfinished").replace(config)
    return directory


def main(words: Sequence[str] | None = None) -> int:
    """Write the checkpoint of a seed; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m refitd_embedded.demo.policy", description="Write the first policy")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (%(default)s)")
    arguments = parser.parse_args(words)
    try:
        print(os.fspath(write(fresh(arguments.seed), arguments.out)))
    except OSError as problem:
        print(f"the policy cannot be written to {arguments.out}: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
