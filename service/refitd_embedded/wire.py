"""Request bodies with SGLang's names and defaults, and the requests of a /generate body, each checked.

Unknown fields are accepted and ignored, as in SGLang.

A real server trusts its clients here: a token id outside the vocabulary, an empty prompt inside a batch, or a negative
`logprob_start_len` other than -1 each takes it down. This engine answers 400.
"""

import uuid
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from refitd_embedded.request import GenerationRequest
from refitd_embedded.sampling import SamplingParams

UNSUPPORTED = {
    "text": "it has no tokenizer, send input_ids",
    "input_embeds": "send input_ids",
    "image_data": "it serves text models only",
    "video_data": "it serves text models only",
    "audio_data": "it serves text models only",
    "top_logprobs_num": "it reports the log-probabilities of the tokens themselves",
    "token_ids_logprob": "it reports the log-probabilities of the tokens themselves",
    "return_hidden_states": "leave it out",
    "return_routed_experts": "leave it out",
    "return_sampling_mask": "leave it out",
    "lora_path": "it serves the base model only",
    "session_params": "leave it out",
    "custom_logit_processor": "leave it out",
}
"""Fields of /generate that would change the answer, and what to do instead. Refused unless empty."""
T = TypeVar("T")


class GenerateBody(BaseModel):
    """POST /generate. The fields from `text` on are known so that they can be refused (see UNSUPPORTED)."""

    rid: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    stream: bool = False
    text: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_sampling_mask: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None


class UpdateFromDiskBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class PauseBody(BaseModel):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(BaseModel):
    """POST /continue_generation."""

    torch_empty_cache: bool = True


class AbortBody(BaseModel):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class VersionBody(BaseModel):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class CheckerBody(BaseModel):
    """GET or POST /weights_checker."""

    action: str = "checksum"
    selector: Literal["target", "draft", "all"] = "all"
    skip_tensor_list: list[str] | None = None


class InterruptBody(BaseModel):
    """POST /embedded/interrupt_loads: see `defects.Interruption`."""

    after: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a prompt must fit: token ids below `vocab_size`, fewer than `context_length` of them."""

    vocab_size: int
    context_length: int


def requests_of(body: GenerateBody, bounds: Bounds) -> list[GenerationRequest]:
    """The requests of one call in the order of the answers: with `n` copies, those of a prompt stand together.

    Raises ValueError, with SGLang's words where it has any.
    """
    for name, advice in UNSUPPORTED.items():
        value = getattr(body, name)
        if any(value) if isinstance(value, list) else value:
            raise ValueError(f"{name} is not supported by the embedded engine: {advice}")
    prompts = _prompts(body)
    raw_params = _each(body.sampling_params or {}, len(prompts), "sampling_params")
    logprobs = _each(body.return_logprob or False, len(prompts), "return_logprob")
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, len(prompts), "logprob_start_len")
    copies = _copies(raw_params)
    rids = _rids(body, len(prompts) * copies)
    found: list[GenerationRequest] = []
    for prompt, raw, logprob, start in zip(prompts, raw_params, logprobs, starts, strict=True):
        params = _bounded(prompt, SamplingParams.parse(raw), bounds)
        if not -1 <= start <= len(prompt):
            raise ValueError(f"logprob_start_len must be -1 or in [0, {len(prompt)}], got {start}.")
        for _ in range(copies):
            rid = rids[len(found)]
            start_len = start if logprob else -1
            found.append(GenerationRequest(rid=rid, prompt=prompt, params=params, return_logprob=logprob,
                                 logprob_start=start_len, stream=body.stream))  # fmt: skip
    return found


def is_batch(body: GenerateBody, requests: list[GenerationRequest]) -> bool:
    """Whether the answer is a list: several prompts, or several copies of one."""
    return len(requests) > 1 or isinstance((body.input_ids or [0])[0], list)


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
