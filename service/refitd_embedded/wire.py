"""Request bodies, with SGLang's names and defaults. Unknown fields are accepted and ignored, as there."""

from typing import Any, Literal

from pydantic import BaseModel

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
