"""Request bodies with SGLang's names and defaults, and the requests of a /generate body, each checked.

Unknown fields are accepted and ignored, as in SGLang.

A real server trusts its clients here: a token id outside the vocabulary or an empty prompt inside a batch takes it
down. This engine answers 400.
"""

import uuid
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from refitd_embedded.model import Adapter, DecoderConfig
from refitd_embedded.runner import GenerationRequest, SamplingParams

UNSUPPORTED = (
    "text", "input_embeds", "image_data", "video_data", "audio_data", "top_logprobs_num", "token_ids_logprob",
    "return_hidden_states", "return_routed_experts", "return_sampling_mask", "session_params", "custom_logit_processor",
)  # fmt: skip
"""Fields of /generate that would change the answer. Refused unless empty."""
T = TypeVar("T")


class GenerateBody(BaseModel):
    """POST /generate. Fields that are not listed here are kept, so that some can be refused (see UNSUPPORTED)."""

    model_config = ConfigDict(extra="allow")

    rid: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    lora_path: str | None = None
    stream: bool = False


class UpdateFromDiskBody(BaseModel):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(BaseModel):
    torch_empty_cache: bool = True


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class VersionBody(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class CheckerBody(BaseModel):
    action: str = "checksum"


class InterruptBody(BaseModel):
    """POST /embedded/interrupt_loads: see `weights.Interruption`."""

    after: int = 1
    times: int = 1


class LoadLoraBody(BaseModel):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoraBody(BaseModel):
    lora_name: str


def requests_of(body: GenerateBody, model: DecoderConfig, adapter: Adapter | None = None) -> list[GenerationRequest]:
    """The requests of one call to a model, in the order of the answers. Raises ValueError, in SGLang's words if any."""
    for name in UNSUPPORTED:
        value = (body.model_extra or {}).get(name)
        if any(cast("list[Any]", value)) if isinstance(value, list) else value:
            raise ValueError(f"{name} is not supported by the embedded engine: send input_ids, and no fields like this")
    prompts = _prompts(body)
    starts = -1 if body.logprob_start_len is None else body.logprob_start_len
    if set(_each(starts, len(prompts), "logprob_start_len")) != {-1}:
        raise ValueError("logprob_start_len has to be -1: the embedded engine reports those of the answer alone")
    raw_params = _each(body.sampling_params or {}, len(prompts), "sampling_params")
    logprobs = _each(body.return_logprob or False, len(prompts), "return_logprob")
    rids = _rids(body, len(prompts))
    return [
        GenerationRequest(
            rid=rid,
            prompt=prompt,
            params=_bounded(prompt, SamplingParams.parse(raw, model.vocab_size), model),
            adapter=adapter,
            return_logprob=logprob,
            stream=body.stream,
        )
        for rid, prompt, raw, logprob in zip(rids, prompts, raw_params, logprobs, strict=True)
    ]


def is_batch(body: GenerateBody) -> bool:
    """Whether the prompts are a list of lists, and so the answers a list."""
    return isinstance((body.input_ids or [0])[0], list)


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


def _rids(body: GenerateBody, count: int) -> list[str]:
    """As given if they fit one to one; a single name for many becomes a prefix; otherwise fresh ones."""
    match body.rid:
        case list() as given if len(given) == count:
            return given
        case list():
            raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
        case str() as name if not is_batch(body):
            return [name]
        case str() as name:
            return [f"{name}_{number}" for number in range(count)]
        case _:
            return [uuid.uuid4().hex for _ in range(count)]


def _bounded(prompt: list[int], params: SamplingParams, model: DecoderConfig) -> SamplingParams:
    """The parameters with `max_new_tokens` known. Raises ValueError for a prompt or a length that does not fit."""
    limit = model.max_position_embeddings
    room = limit - len(prompt)
    if outside := [token for token in prompt if not 0 <= token < model.vocab_size]:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary [0, {model.vocab_size}).")
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
