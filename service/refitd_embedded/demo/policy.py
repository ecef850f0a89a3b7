"""The policy and what it learns: a Qwen2 decoder of 400,000 parameters that counts on in strides, modulo 16.

A prompt is two tokens, a stride and a number: `[by 3] 7`. The answer goes on: `10 13 0 3 6 9 12 15`. Each token of an
answer is marked against the one before it, so that a slip costs one mark and not the rest, and every token's reward
is computed rather than judged. Guessing among all 32 tokens is right once in 32 times; the reward of an answer is the
mean of its marks, between 0 and 1.

The policy gradient is GRPO's clipped objective, on marks for single tokens:

    advantage = mark - mean mark of the group at that place, over the batch's deviation
    loss      = -mean(min(ratio · advantage, clip(ratio) · advantage)) - a little entropy

A group is several answers to one problem. The ratio is of the policy now to the policy that sampled, whose
log-probabilities came with the rollouts: on fresh rollouts it is 1, on stale ones the clip keeps the policy from
running away from them.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from refitd_embedded.model import Decoder, DecoderConfig

NUMBERS = 16
STRIDES = (1, 2, 3)
VOCABULARY = 32  # numbers, strides, and tokens that are never right
PROMPT = 2
ANSWER = 8
CHANCE = 1 / VOCABULARY
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
LEARNING_RATE = 2e-3
CLIP = 0.2
ENTROPY = 0.01
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class CountingProblem:
    stride: int
    start: int

    @property
    def prompt(self) -> list[int]:
        return [NUMBERS + STRIDES.index(self.stride), self.start]

    def solution(self) -> list[int]:
        """The answer that gets every mark."""
        return [(self.start + self.stride * place) % NUMBERS for place in range(1, ANSWER + 1)]

    def marks(self, answer: Sequence[int]) -> list[float]:
        """1 for each token that follows the one before it by the stride, else 0."""
        pairs = zip([self.start, *answer], answer, strict=False)
        return [float(one < NUMBERS and token == (one + self.stride) % NUMBERS) for one, token in pairs]


def problems(source: random.Random, count: int) -> list[CountingProblem]:
    return [CountingProblem(source.choice(STRIDES), source.randrange(NUMBERS)) for _ in range(count)]


def fresh(seed: int) -> Decoder:
    """A decoder with weights drawn from `seed`, independent of torch's own generator."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Rollouts as tensors. `tokens` is [rows, prompt + answer]; the others are [rows, answer]: the log-probability of
    each token as its engine reported it, and its advantage.
    """

    tokens: Tensor
    sampled: Tensor
    advantages: Tensor


class PolicyTrainer:
    """Owns the policy and its optimiser. `step` counts the gradient steps taken."""

    def __init__(self, policy: Decoder) -> None:
        self.policy, self.step = policy, 0
        self._optimiser = torch.optim.AdamW(
            policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

    def learn(self, batch: TrainingBatch) -> float:
        """Take one gradient step; the loss before it."""
        loss = objective(answer_distribution(self.policy, batch.tokens, batch.sampled.shape[1]), batch)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), LARGEST_GRADIENT)
        self._optimiser.step()
        self.step += 1
        return loss.item()


def advantages(marks: Tensor) -> Tensor:
    """[problems, group, answer] marks → their advantages. Zero throughout where all marks are equal."""
    centred = marks - marks.mean(1, keepdim=True)
    return centred / (centred.square().mean().sqrt() + 1e-6)


def answer_distribution(policy: Decoder, tokens: Tensor, answer: int) -> Tensor:
    """Tokens [rows, time] → log-probabilities [rows, answer, vocabulary] of each of the last `answer` places."""
    return policy(tokens[:, :-1])[:, -answer:].float().log_softmax(-1)


def chosen(distribution: Tensor, tokens: Tensor) -> Tensor:
    """[rows, answer, vocabulary] and tokens [rows, prompt + answer] → [rows, answer]: of the tokens themselves."""
    return distribution.gather(-1, tokens[:, -distribution.shape[1] :, None])[..., 0]


def objective(distribution: Tensor, batch: TrainingBatch) -> Tensor:
    """The loss, a scalar."""
    ratio = (chosen(distribution, batch.tokens) - batch.sampled).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return -gain.mean() - ENTROPY * entropy.mean()
