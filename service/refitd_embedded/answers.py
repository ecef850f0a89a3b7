"""What /generate answers, field by field as SGLang 0.5.23 does. `text` is empty: there is no tokenizer here."""

import math
from typing import Any

from refitd_embedded.request import Request

Answer = dict[str, Any]
TokenLogprob = list[float | int | None]
"""[log-probability or null, token id, null]: the third is the token's text, which nobody here knows."""


def answer(request: Request, label: str) -> Answer:
    """The answer so far. `label` is the front end's weight version, which counts until the request has ended."""
    return {"text": "", "output_ids": list(request.output), "meta_info": _meta(request, label)}


def input_token_logprobs(request: Request) -> list[TokenLogprob]:
    """From `logprob_start_len` on. The first token wanted has no log-probability: nothing is said to precede it."""
    if request.logprob_start < 0 or request.input_logprobs is None:
        return []
    tokens = request.prompt[request.logprob_start :]
    known = (None if math.isnan(logprob) else logprob for logprob in request.input_logprobs)
    logprobs = [None, *known][: len(tokens)]
    return [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]


def output_token_logprobs(request: Request) -> list[TokenLogprob]:
    """One for each output token; null where a broken model gave NaN."""
    pairs = zip(request.output_logprobs, request.output, strict=True)
    return [[None if math.isnan(logprob) else logprob, token, None] for logprob, token in pairs]


def _meta(request: Request, label: str) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish}
    if not request.ended_waiting:
        meta["prompt_tokens"] = len(request.prompt)
        meta["num_retractions"] = request.retractions
    meta["weight_version"] = request.spans[-1].version if request.spans else label
    if request.return_logprob:
        outputs = output_token_logprobs(request)
        meta["input_token_logprobs"] = input_token_logprobs(request)
        meta |= {"output_token_logprobs": outputs, "output_token_logprobs_length": len(outputs)}
    if not request.ended_waiting:
        meta |= {"reasoning_tokens": 0, "cached_tokens": 0, "cached_tokens_details": None, "dp_rank": None}
    meta["completion_tokens"] = len(request.output)
    if request.finish is not None:
        meta["weight_versions"] = [
            {"version": span.version, "start": span.start, "end": span.end} for span in request.spans
        ]
        meta["e2e_latency"] = request.lived
    return meta
