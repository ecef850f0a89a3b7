"""What trainer and engines are asked to do: the settings that decide how much memory they take, and their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from refitd_client.contract.decoding import converted
from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import SGLANG


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


_Tokens = Annotated[int, Meta(ge=1, le=2**27)]


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
    lora_rank: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    batch_size: Annotated[int, Meta(ge=1, le=2**24)] = 8
    samples: Annotated[int, Meta(ge=1, le=2**16)] = 4
    prompt_tokens: _Tokens = 512
    max_new_tokens: _Tokens = 512
    micro_batch_tokens: Annotated[int, Meta(ge=1, le=2**30)] = 10_240
    concurrent_rollouts: Annotated[int, Meta(ge=1, le=2**24)] = 32
    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] | None = None
    context_length: _Tokens | None = None
    running_requests: Annotated[int, Meta(ge=1, le=2**24)] | None = None

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
        return self.concurrent_rollouts * self.samples


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(JobSettings)}
"""The defaults by setting."""


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
    try:
        job = converted(said, JobSettings)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        why = f"it is {', '.join(_WORDS[name])}" if name in _WORDS else why
        raise PlanRefusedError(f"--{name.replace('_', '-')} is {said[name]!r}: {why}") from error
    assumed = _ASSUMED if engine == SGLANG else {**_ASSUMED, "mem_fraction_static": _SHARE_OF_VLLM}
    return job, [text for name, text in assumed.items() if name not in said]


_WORDS: Mapping[str, type[StrEnum]] = {"precision": Precision, "optimizer": Optimizer, "loss": Loss}
