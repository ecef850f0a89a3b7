"""A trial of an engine: a few greedy tokens, and what is wrong with the answer. Pure."""

import math
from typing import Any

import msgspec

from refitd.engine.http import NoReply, Reply

TRIAL_SECONDS = 60.0
TRIAL: dict[str, Any] = {
    "input_ids": [1, 2, 3],  # in every vocabulary, and no tokenizer is needed
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_version: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


def trial_fault(reply: Reply | NoReply, label: str) -> str | None:
    """Why the answer to `TRIAL` is not in order: no tokens, no number where a log-probability belongs, another label.

    `label` is the weight_version that the answer must claim, where the server names one.
    """
    if isinstance(reply, NoReply):
        return f"no answer to a trial: {reply.reason}"
    if not reply.ok:
        return f"a trial was answered {reply.status}: {reply.short_message}"
    try:
        meta = msgspec.convert(reply.data, _Answer).meta_info
    except msgspec.ValidationError as error:
        return f"the answer to a trial cannot be read: {error}"
    if not meta.output_token_logprobs:
        return "a trial brought no tokens"
    if not all(math.isfinite(logprob) for logprob, _, _ in meta.output_token_logprobs):
        return "a trial brought tokens whose log-probability is no number"
    if meta.weight_version not in (None, label):
        return f"a trial was answered by version {meta.weight_version!r}, not {label!r}"
    return None
