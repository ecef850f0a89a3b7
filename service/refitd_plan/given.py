"""A job of what somebody gave, and what is assumed of the settings that nobody did."""

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.faults import word
from refitd_plan.job import DEFAULTS, Job, flag
from refitd_plan.words import AttentionBackend, Loss, Optimizer, Precision

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
    "attention_backend": "SGLang's attention is FlashInfer, which keeps a workspace",
}


def job_of(given: Mapping[str, Any]) -> tuple[Job, list[str]]:
    """The job with what was given, and what is assumed of the rest. None counts as not given.

    Raises:
        PlanRefusedError: a name is no setting, or a value cannot be.
    """
    known = {field.name for field in fields(Job)}
    said = {name: value for name, value in given.items() if value is not None}
    if strange := sorted(said.keys() - known):
        raise PlanRefusedError(f"{strange[0]} is no setting of a plan: there are {', '.join(sorted(known))}")
    for name, choices in _WORDS.items():
        if name in said:
            said[name] = word(flag(name), said[name], choices)
    return Job(**said), [text for name, text in _ASSUMED.items() if name not in said]


_WORDS: Mapping[str, type[StrEnum]] = {
    "precision": Precision,
    "optimizer": Optimizer,
    "loss": Loss,
    "attention_backend": AttentionBackend,
}
