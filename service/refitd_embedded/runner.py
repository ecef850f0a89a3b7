"""One prompt on its way to an answer, and one forward of the model for all running requests. Blocking: it runs in a
thread.

There is no key-value cache: each step computes all tokens of all running requests. So an answer that goes on after a
load goes on as if it had been retracted, whichever way the engine was paused.

Log-probabilities are SGLang's: of the distribution after temperature; greedy rows (temperature 0) count with
temperature 1. A row with a `sampling_seed` is drawn by a number that follows from seed and position: its answer
depends neither on the rest of the batch nor on the run. (SGLang draws other numbers from the same seed.)

`sampling_params` have SGLang's names, defaults, limits and error texts. What needs a tokenizer (stop strings,
grammars) or is not computed here (top_k, top_p, penalties) is refused by name when it is set to anything but its
neutral value: a rollout must not silently sample from another distribution than the one asked for.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from refitd_client.contract.decoding import converted
from refitd_embedded.model import Adapter, AdapterRows, Decoder

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stop", "stop_regex"), (None, [], "")),
    **dict.fromkeys(("n", "top_p", "repetition_penalty", "beam_width"), (None, 1)),
    **dict.fromkeys(("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty"), (None, 0)),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), (None, "")),
    **dict.fromkeys(("logit_bias", "custom_params"), (None, {})),
    "top_k": (None, -1),  # or any number from the size of the vocabulary on: all tokens
    "watermark": (None,),
    "choice": (None, []),
}
"""Known to SGLang, not to this engine: accepted with these values only."""
IGNORED = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
TOP_K_ALL = 2**30
"""SGLang's number for all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn. `max_new_tokens` None means: as long as the context allows."""

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, rather than one drawn."""
        return self.temperature < 1e-6

    @classmethod
    def parse(cls, raw: dict[str, Any], vocab_size: int = TOP_K_ALL) -> "SamplingParams":
        """Read a request's `sampling_params` for a model with this vocabulary. Raises ValueError."""
        known = [*cls.__slots__, *NEUTRAL, *sorted(IGNORED)]
        for name, value in raw.items():
            if name not in known:
                raise ValueError(f"unknown field `{name}`, expected one of {', '.join(f'`{each}`' for each in known)}")
            draws_from_all = name == "top_k" and isinstance(value, int) and value >= vocab_size
            if name in NEUTRAL and value not in NEUTRAL[name] and not draws_from_all:
                raise ValueError(f"{name} is not supported by the embedded engine: leave it out")
        # A null means the default, but for max_new_tokens, where it means no limit.
        given = {
            name: value
            for name, value in raw.items()
            if name in cls.__slots__ and (value is not None or name == "max_new_tokens")
        }
        try:
            params = converted(given, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(f"sampling_params: {problem}") from problem
        if not math.isfinite(params.temperature) or params.temperature < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {params.temperature}.")
        if params.max_new_tokens is not None and params.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
        if params.sampling_seed is not None and not -(2**63) <= params.sampling_seed < 2**63:
            raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {params.sampling_seed}.")
        return params


def draw(
    params: Sequence[SamplingParams], logits: Tensor, positions: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        params: of each row.
        logits: [rows, vocab].
        positions: of each row's last token.
        generator: the source of unseeded noise.

    Returns:
        Token ids and their log-probabilities, both [rows]. A row of NaN gives token 0 and NaN.
    """
    greedy = torch.tensor([each.greedy for each in params])
    temperatures = torch.tensor([1.0 if each.greedy else each.temperature for each in params])[:, None]
    logprobs = (logits.float() / temperatures).log_softmax(-1)
    # One uniform number a row, looked up in the cumulated probabilities: a tenth of the cost of noise a token.
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    numbers = torch.rand(total.shape, generator=generator, dtype=torch.float64)
    for row, each in enumerate(params):
        if each.sampling_seed is not None:
            numbers[row] = random.Random(f"{each.sampling_seed} {positions[row]}").random()  # noqa: S311 - no secret
    drawn = torch.searchsorted(cumulated, numbers * total, right=True)[:, 0]
    drawn = drawn.clamp_(max=logprobs.shape[-1] - 1).masked_fill_(total[:, 0].isnan(), 0)
    ids = torch.where(greedy, logits.float().argmax(-1), drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


Finish = dict[str, Any]
"""SGLang's `finish_reason`: `{"type": "stop" | "length" | "abort", …}`."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled from the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One prompt, and what was generated so far. The scheduler's thread reads it; only the event loop changes it.

    `changed` is called on every change while `stream` is set, and at the end in any case. `ended_waiting`: aborted in
    the queue, where SGLang knows less of it. `relabelled`: (version, number of tokens when it ended).
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    adapter: Adapter | None = None
    return_logprob: bool = False
    stream: bool = False
    output: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    finish: Finish | None = None
    ended_waiting: bool = False
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    relabelled: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    retractions: int = 0
    born: float = field(default_factory=time.monotonic)
    lived: float | None = None
    changed: Callable[["GenerationRequest"], None] = lambda _request: None

    def relabel(self, old: str) -> None:
        """From now on tokens come from other weights; those so far came from `old`."""
        if self.output:
            self.relabelled.append((old, len(self.output)))

    def end(self, reason: Finish, version: str) -> None:
        """Finish, under the weights labelled `version`."""
        self.finish = reason
        self.spans = spans([*self.relabelled, (version, len(self.output))], len(self.output))
        self.lived = time.monotonic() - self.born
        self.changed(self)


def spans(changes: list[tuple[str, int]], tokens: int) -> list[VersionSpan]:
    """Which tokens came from which version; `changes` are (version, number of tokens when it ended), in order.

    >>> spans([("7", 2), ("8", 5)], 5)
    [VersionSpan(version='7', start=0, end=2), VersionSpan(version='8', start=2, end=5)]
    """
    found: list[VersionSpan] = []
    for version, end in changes:
        start = found[-1].end if found else 0
        if found and min(end, tokens) <= start:
            continue
        if found and found[-1].version == version:
            start = found.pop().start
        found.append(VersionSpan(version, start, min(end, tokens)))
    return found


def finished(request: GenerationRequest, eos: frozenset[int]) -> Finish | None:
    """Whether the last token ends the answer, and why. A stop token counts before the length, and stays in."""
    params, output = request.params, request.output
    last = output[-1] if output else None
    if last is not None and not params.ignore_eos and (last in params.stop_token_ids or last in eos):
        return {"type": "stop", "matched": last}
    if params.max_new_tokens is not None and len(output) >= params.max_new_tokens:
        return {"type": "length", "length": params.max_new_tokens}
    return None


def aborted(*, ran: bool) -> Finish:
    """SGLang tells requests that were running from those that were waiting."""
    if ran:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "abort", "message": "Abort in waiting queue"}


class Runner:
    """The model and its source of randomness."""

    def __init__(self, decoder: Decoder, seed: int, *, enable_lora: bool = False) -> None:
        self._decoder = decoder
        self._adapters = AdapterRows(decoder) if enable_lora else None
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def step(self, requests: Sequence[GenerationRequest]) -> list[tuple[int, float]]:
        """The next token of each request, and its log-probability. All go through the model in one padded batch."""
        rows = [request.prompt + request.output for request in requests]
        last = torch.tensor([len(row) - 1 for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        if self._adapters is not None:
            self._adapters.rows = [request.adapter for request in requests]
        hidden = self._decoder.hidden(ids)[torch.arange(len(rows)), last]
        params = [request.params for request in requests]
        tokens, logprobs = draw(params, self._decoder.logits(hidden), last.tolist(), self._generator)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
