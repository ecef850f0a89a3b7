"""From a /generate body to requests: one prompt or many, each checked before anything is computed.

A real server trusts its clients here: a token id outside the vocabulary, an empty prompt inside a batch, or a negative
`logprob_start_len` other than -1 each takes it down. This engine answers 400.
"""

import uuid
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from refitd_embedded.request import Request
from refitd_embedded.sampling_params import SamplingParams
from refitd_embedded.wire import UNSUPPORTED, GenerateBody

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a prompt must fit: token ids below `vocab_size`, fewer than `context_length` of them."""

    vocab_size: int
    context_length: int


def requests_of(body: GenerateBody, bounds: Bounds) -> list[Request]:
    """The requests of one call in the order of the answers: with `n` copies, those of a prompt stand together.

    Raises ValueError, with SGLang's words where it has any.
    """
    _refuse_the_unsupported(body)
    prompts = _prompts(body)
    raw_params = _each(body.sampling_params or {}, len(prompts), "sampling_params")
    logprobs = _each(body.return_logprob or False, len(prompts), "return_logprob")
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, len(prompts), "logprob_start_len")
    copies = _copies(raw_params)
    rids = _rids(body, len(prompts) * copies)
    found: list[Request] = []
    for prompt, raw, logprob, start in zip(prompts, raw_params, logprobs, starts, strict=True):
        params = _bounded(prompt, SamplingParams.parse(raw), bounds)
        _check_start(start, prompt)
        for _ in range(copies):
            rid = rids[len(found)]
            start_len = start if logprob else -1
            found.append(Request(rid=rid, prompt=prompt, params=params, return_logprob=logprob,
                                 logprob_start=start_len, stream=body.stream))  # fmt: skip
    return found


def is_batch(body: GenerateBody, requests: list[Request]) -> bool:
    """Whether the answer is a list: several prompts, or several copies of one."""
    return len(requests) > 1 or isinstance((body.input_ids or [0])[0], list)


def _refuse_the_unsupported(body: GenerateBody) -> None:
    for name in UNSUPPORTED:
        value = getattr(body, name)
        if any(value) if isinstance(value, list) else value:
            raise ValueError(f"{name} is not supported by the embedded engine: {UNSUPPORTED[name]}")


def _prompts(body: GenerateBody) -> list[list[int]]:
    ids = body.input_ids
    if ids is None:
        raise ValueError("input_ids should be provided: the embedded engine has no tokenizer.")
    if not ids:
        raise ValueError("input_ids cannot be empty.")
    prompts: list[Any] = ids if isinstance(ids[0], list) else [ids]
    if not all(prompts):
        raise ValueError("input_ids cannot be empty: one prompt of the batch is.")
    return prompts


def _each(value: T | list[T], count: int, name: str) -> list[T]:
    """One value for each prompt: a list as it is, anything else repeated."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"The length of {name} should be equal to the batch size: {len(value)} for {count} prompts.")
    return value


def _copies(params: list[dict[str, Any]]) -> int:
    wanted = {raw.get("n", 1) for raw in params}
    if len(wanted) > 1:
        raise ValueError("The parallel_sample_num should be the same for all samples in sample params.")
    (copies,) = wanted
    if not isinstance(copies, int) or copies < 1:
        raise ValueError(f"n must be at least 1, got {copies}.")
    return copies


def _rids(body: GenerateBody, count: int) -> list[str]:
    """As given if they fit one to one; a single name for many becomes a prefix; otherwise fresh ones."""
    match body.rid:
        case list() as given if len(given) == count:
            return given
        case list():
            raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
        case str() as name if count == 1 and not isinstance((body.input_ids or [0])[0], list):
            return [name]
        case str() as name:
            return [f"{name}_{number}" for number in range(count)]
        case _:
            return [uuid.uuid4().hex for _ in range(count)]


def _bounded(prompt: list[int], params: SamplingParams, bounds: Bounds) -> SamplingParams:
    """The parameters with `max_new_tokens` known. Raises ValueError for a prompt or a length that does not fit."""
    limit, room = bounds.context_length, bounds.context_length - len(prompt)
    if outside := [token for token in prompt if not 0 <= token < bounds.vocab_size]:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary [0, {bounds.vocab_size}).")
    if room <= 0:
        raise ValueError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
        )
    if params.max_new_tokens is None:
        return replace(params, max_new_tokens=room)
    if params.max_new_tokens > room:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {len(prompt) + params.max_new_tokens} tokens: {len(prompt)} tokens from the input messages and "
            f"{params.max_new_tokens} tokens for the completion."
        )
    return params


def _check_start(start: int, prompt: list[int]) -> None:
    if not -1 <= start <= len(prompt):
        raise ValueError(f"logprob_start_len must be -1 or in [0, {len(prompt)}], got {start}.")
