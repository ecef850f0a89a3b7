"""What trainer and engines are asked to do: the settings that decide how much memory they take, and their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import SGLANG, check_positive, check_share, check_switch, check_word


class Precision(StrEnum):
    """How the trainer keeps its weights. Bytes a parameter: see `memory.py`."""

    BF16 = "bf16"  # weights, gradients and moments in bf16
    MIXED = "mixed"  # bf16 weights and gradients; master weights and moments in fp32
    FP32 = "fp32"  # everything in fp32


class Optimizer(StrEnum):
    """What it keeps a parameter: two moments, two of 8 bits, or nothing."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"
    SGD = "sgd"


class Loss(StrEnum):
    """How the loss treats the logits: chunked or fused, or in fp32 all at once."""

    FUSED = "fused"
    EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of a job, named as the flags of `refitd plan`. Tokens are counted per sequence or micro-batch.

    None stands for what SGLang or the model decides. `context_length` and `running_requests` bound one engine rank.
    """

    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    loss: Loss = Loss.FUSED
    gradient_checkpointing: bool = False
    expandable_segments: bool = False
    reference_model: bool = False
    lora_rank: int | None = None
    batch_size: int = 8
    samples: int = 4
    prompt_tokens: int = 512
    max_new_tokens: int = 512
    micro_batch_tokens: int = 10_240
    concurrent_rollouts: int = 32
    mem_fraction_static: float | None = None
    context_length: int | None = None
    running_requests: int | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be.

        Raises:
            PlanRefusedError: a value is no number, not above 0, or absurd; the message names it.
        """
        for name, most in _MOST.items():
            check_positive(flag(name), getattr(self, name), most=most)
        for name in _SWITCHES:
            check_switch(flag(name), getattr(self, name))
        check_share("--mem-fraction-static", self.mem_fraction_static)

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence that is generated and trained on."""
        return self.prompt_tokens + self.max_new_tokens

    def batch_tokens(self, ranks: int) -> int:
        """The share of a step's batch that one of so many data-parallel ranks trains on; a sequence is never cut."""
        return -(-self.batch_size * self.samples // ranks) * self.sequence_tokens

    def trained_tokens(self, ranks: int) -> int:
        """Tokens of a rank's largest micro-batch: what its share has, if that is less than what one may have."""
        return min(self.micro_batch_tokens, self.batch_tokens(ranks))

    def accumulates(self, ranks: int) -> bool:
        """Whether a rank's step has several micro-batches, whose gradients add up."""
        return self.batch_tokens(ranks) > self.micro_batch_tokens

    @property
    def requests(self) -> int:
        """Sequences that are generated at a time, over all engines."""
        return self.concurrent_rollouts * self.samples


_MOST: Mapping[str, float] = {
    "lora_rank": 65_536,
    "batch_size": 2**24,
    "samples": 2**16,
    "prompt_tokens": 2**27,
    "max_new_tokens": 2**27,
    "micro_batch_tokens": 2**30,
    "concurrent_rollouts": 2**24,
    "context_length": 2**27,
    "running_requests": 2**24,
}
_SWITCHES = ("gradient_checkpointing", "reference_model", "expandable_segments")
DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(JobSettings)}
"""The defaults by setting."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_ASSUMED: Mapping[str, str] = {
    "precision": "the trainer keeps weights, gradients and moments in bf16",
    "optimizer": "the optimizer is AdamW",
    "loss": "the loss takes the logits in chunks or fused, without a copy of all of them in fp32",
    "gradient_checkpointing": "the trainer stores activations, it does not recompute them",
    "reference_model": "a reference model is not planned for (--reference-model)",
    "batch_size": f"{DEFAULTS['batch_size']} prompts a step",
    "samples": f"{DEFAULTS['samples']} samples a prompt",
    "prompt_tokens": f"a prompt has at most {DEFAULTS['prompt_tokens']} tokens",
    "max_new_tokens": f"an answer has at most {DEFAULTS['max_new_tokens']} tokens",
    "micro_batch_tokens": f"a micro-batch of the trainer has at most {DEFAULTS['micro_batch_tokens']} tokens",
    "concurrent_rollouts": f"{DEFAULTS['concurrent_rollouts']} rollouts at a time",
    "mem_fraction_static": "mem_fraction_static is what SGLang chooses for GPUs of this size",
}


_SHARE_OF_VLLM = "mem_fraction_static stands for vLLM's gpu_memory_utilization, which is 0.92 by itself"


def job_of(given: Mapping[str, Any], engine: str = SGLANG) -> tuple[JobSettings, list[str]]:
    """The settings of a job, and a sentence for each that was assumed. None counts as not given.

    Raises:
        PlanRefusedError: a name is no setting, or a value cannot be.
    """
    known = DEFAULTS.keys()
    said = {name: value for name, value in given.items() if value is not None}
    if strange := sorted(said.keys() - known):
        raise PlanRefusedError(f"{strange[0]} is no setting of a plan: there are {', '.join(sorted(known))}")
    for name, choices in _WORDS.items():
        if name in said:
            said[name] = check_word(flag(name), said[name], choices)
    assumed = _ASSUMED if engine == SGLANG else {**_ASSUMED, "mem_fraction_static": _SHARE_OF_VLLM}
    return JobSettings(**said), [text for name, text in assumed.items() if name not in said]


_WORDS: Mapping[str, type[StrEnum]] = {
    "precision": Precision,
    "optimizer": Optimizer,
    "loss": Loss,
}
