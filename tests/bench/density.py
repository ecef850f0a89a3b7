"""How many bf16 weights change in a step: a small model that has learned, fine-tuned by AdamW on another text.

    python tests/bench/density.py [--out FILE] [--steps 50] [--learning 400] [--size small|medium] [--device cpu|cuda]

The model learns the sources of Python's standard library byte by byte, to a loss that shows that it has; its weights
are rounded to bf16, as checkpoints are. From there it is fine-tuned on the English of Python's own help pages, as
trainers do it: fp32 masters of the bf16 weights, AdamW, each step cast to bf16 and compared with the step before. And
once more without masters: weights, gradients and moments in bf16, so that an update that is too small is lost.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from figures import report
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

RATES = (1e-6, 1e-5, 1e-4)
MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}
COMMON: dict[str, Any] = {"vocab_size": 256, "num_key_value_heads": 2, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "medium": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model, where it is, and how much it sees in a step: sequences, and bytes of each."""

    size: str
    device: str
    batch: int
    length: int

    def model(self) -> Qwen2ForCausalLM:
        """With random weights, always the same."""
        torch.manual_seed(0)
        config = Qwen2Config(**COMMON, **SIZES[self.size], max_position_embeddings=self.length)
        return Qwen2ForCausalLM(config).to(self.device)


State = dict[str, torch.Tensor]


@dataclass(slots=True)
class Run:
    """One learning rate: shares of all elements, step by step, and losses. `union` changed in any step.

    `masters` are what AdamW changes: fp32 copies of the weights, or the bf16 weights themselves.
    """

    rate: float
    masters: str
    shares: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    union: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """What is committed."""
        return {
            "learning_rate": self.rate,
            "masters": self.masters,
            "first": self.shares[0],
            "median": statistics.median(self.shares),
            "last": self.shares[-1],
            "least": min(self.shares),
            "most": max(self.shares),
            "changed in any step": self.union,
            "loss": [self.losses[0], self.losses[-1]],
            "steps": self.shares,
        }


def main() -> None:
    """Learn once, fine-tune with each kind of masters at each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=50, help="steps of each fine-tuning")
    parser.add_argument("--learning", type=int, default=400, help="steps until the model has learned")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    batch, length = (4, 192) if arguments.size == "small" else (16, 512)
    setting = Setting(size=arguments.size, device=arguments.device, batch=batch, length=length)
    start, learned = _learned(setting, arguments.learning)
    runs = [_fine_tuned(setting, start, Run(rate, kind), arguments.steps) for kind in MASTERS for rate in RATES]
    for run in runs:
        shown = {name: value for name, value in run.as_json().items() if name != "steps"}
        print(json.dumps(shown))
    if arguments.out is not None:
        found = {
            "model": COMMON | SIZES[setting.size],
            "device": torch.cuda.get_device_name() if setting.device == "cuda" else "cpu",
            "elements": sum(tensor.numel() for tensor in start.values()),
            "optimizer": ADAMW,
            "batch": [setting.batch, setting.length],
            "learned": learned,
            "runs": [run.as_json() for run in runs],
            "seconds": round(time.monotonic() - began),
        }
        arguments.out.write_text(json.dumps(report([], shlex.join(sys.argv)) | found, indent=1) + "\n")


def _learned(setting: Setting, steps: int) -> tuple[State, dict[str, float]]:
    """The model's weights after it has learned to write Python, in bf16; its first and last losses."""
    logging.disable_progress_bar()
    model = setting.model()
    most = 2e-3 if setting.size == "small" else 5e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=most, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
    )
    batches = _batches(setting, _sources(), seed=1)
    losses: list[float] = []
    for _ in range(steps):
        losses.append(_step(model, optimizer, next(batches)))
        schedule.step()
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}
    return state, {"first loss": losses[0], "last loss": statistics.mean(losses[-10:])}


def _fine_tuned(setting: Setting, start: State, run: Run, steps: int) -> Run:
    model = setting.model().to(MASTERS[run.masters])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in start.items():
            parameters[name].copy_(tensor)  # the masters begin as what the checkpoint holds
    optimizer = torch.optim.AdamW(parameters.values(), lr=run.rate, **ADAMW)
    batches = _batches(setting, _help(), seed=2)
    before = start
    elements = sum(tensor.numel() for tensor in start.values())
    touched = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in start.items()}
    for _ in range(steps):
        run.losses.append(_step(model, optimizer, next(batches)))
        now = {name: parameters[name].detach().to(torch.bfloat16, copy=True) for name in start}
        changed = {name: now[name].view(torch.int16) != before[name].view(torch.int16) for name in start}
        run.shares.append(sum(int(each.sum()) for each in changed.values()) / elements)
        for name, each in changed.items():
            touched[name] |= each
        before = now
    run.union = sum(int(each.sum()) for each in touched.values()) / elements
    return run


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _batches(setting: Setting, text: bytes, seed: int) -> Iterator[torch.Tensor]:
    """Pieces of the text, from anywhere, for ever."""
    chance = random.Random(seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(setting.device).long()
    while True:
        begins = [chance.randrange(len(data) - setting.length) for _ in range(setting.batch)]
        yield torch.stack([data[begin : begin + setting.length] for begin in begins])


def _sources() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _help() -> bytes:
    return "\n".join(topics.topics.values()).encode()


if __name__ == "__main__":
    main()
