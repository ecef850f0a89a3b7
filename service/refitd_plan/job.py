"""What trainer and engines are asked to do: the settings that decide how much memory they take."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.faults import positive, share, switch
from refitd_plan.words import AttentionBackend, Loss, Optimizer, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The settings. Names are those of the flags of `refitd plan`; tokens are counted per sequence or micro-batch.

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
    max_total_tokens: int | None = None
    kv_cache_bytes: int = 2
    context_length: int | None = None
    running_requests: int | None = None
    attention_backend: AttentionBackend = AttentionBackend.FLASHINFER
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            PlanRefusedError: a number is not above 0, or absurd, or none; the message names it.
        """
        for name, most in _MOST.items():
            positive(flag(name), getattr(self, name), most=most)
        for name in _SWITCHES:
            switch(flag(name), getattr(self, name))
        share("--mem-fraction-static", self.mem_fraction_static)
        if self.kv_cache_bytes not in {1, 2}:
            raise PlanRefusedError(f"kv_cache_bytes is {self.kv_cache_bytes}: 2 (bf16) or 1 (fp8)")

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
    "max_total_tokens": 2**40,
    "context_length": 2**27,
    "running_requests": 2**24,
}
_SWITCHES = ("gradient_checkpointing", "reference_model", "expandable_segments", "cuda_graphs")
DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Job)}
"""What is taken where nobody said anything, by setting."""


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
