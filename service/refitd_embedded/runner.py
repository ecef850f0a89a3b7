"""One forward of the model for all running requests at once, with their key-value cache. Blocking: it runs in a thread.

The runner knows which request sits in which cache row. Every call names the running requests, and drops the rows of
all others.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from refitd_client.contract.decoding import converted
from refitd_embedded.model import Adapter, AdapterRows, Attend, Decoder, DecoderConfig, attend_causally

# Drawing one token for each row of a batch with its log-probability, and the settings of one request for that.
#
# Log-probabilities are SGLang's: of the distribution after temperature; greedy rows (temperature 0) count with
# temperature 1. A row with a `sampling_seed` is drawn by a number that follows from seed and position: its answer
# depends neither on the rest of the batch nor on the run. (SGLang draws other numbers from the same seed.)
#
# `sampling_params` have SGLang's names, defaults, limits and error texts. What needs a tokenizer (stop strings,
# grammars) or is not computed here (top_k, top_p, penalties) is refused by name when it is set to anything but its
# neutral value: a rollout must not silently sample from another distribution than the one asked for.


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "n": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, -1),  # or any number from the size of the vocabulary on: all tokens
    "min_p": (None, 0),
    "min_new_tokens": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None,),
    "choice": (None, []),
}
"""Known to SGLang, not to this engine: accepted with these values only."""

IGNORED = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
"""About text, or dealt with elsewhere."""

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
                raise ValueError(f"unknown field `{name}`, expected one of {', '.join(f'`{one}`' for one in known)}")
            draws_from_all = name == "top_k" and isinstance(value, int) and value >= vocab_size
            if name in NEUTRAL and value not in NEUTRAL[name] and not draws_from_all:
                raise ValueError(f"{name} is not supported by the embedded engine: leave it out")
        given = {name: value for name, value in raw.items() if name in cls.__slots__}
        # A null means the default, but for max_new_tokens, where it means no limit.
        given = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        try:
            params = converted(given, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(f"sampling_params: {problem}") from problem
        return params.checked()

    def checked(self) -> "SamplingParams":
        """These, if they are within SGLang's limits. Raises ValueError."""
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {self.temperature}.")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
        if self.sampling_seed is not None and not -(2**63) <= self.sampling_seed < 2**63:
            raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {self.sampling_seed}.")
        return self


class Sampler:
    """Draws for one composition of a batch. `generator` is the source of unseeded noise."""

    def __init__(self, params: Sequence[SamplingParams], generator: torch.Generator) -> None:
        self._generator = generator
        self._greedy = torch.tensor([one.greedy for one in params])
        self._all_greedy = all(one.greedy for one in params)
        self._temperatures = torch.tensor([1.0 if one.greedy else one.temperature for one in params])[:, None]
        self._seeds = {row: one.sampling_seed for row, one in enumerate(params) if one.sampling_seed is not None}

    def draw(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [rows, vocab] and the position of each row's last token → token ids and their log-probabilities,
        both [rows]. A row of NaN gives token 0 and NaN.
        """
        logits = logits.float()
        ids = logits.argmax(-1)
        scaled = logits if self._all_greedy else logits / self._temperatures
        logprobs = scaled.log_softmax(-1)
        if not self._all_greedy:
            ids = torch.where(self._greedy, ids, self._draw_ids(logprobs, positions))
        return ids, logprobs.gather(-1, ids[:, None])[:, 0]

    def _draw_ids(self, logprobs: Tensor, positions: Tensor) -> Tensor:
        # One uniform number a row, looked up in the cumulated probabilities: a tenth of the cost of noise a token.
        cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
        total = cumulated[:, -1:]
        drawn = torch.rand(total.shape, generator=self._generator, dtype=torch.float64)
        for row, seed in self._seeds.items():
            drawn[row] = random.Random(f"{seed} {positions[row]}").random()  # noqa: S311 - sampling, no secret
        ids = torch.searchsorted(cumulated, drawn * total, right=True)[:, 0]
        return ids.clamp_(max=logprobs.shape[-1] - 1).masked_fill_(total[:, 0].isnan(), 0)


# One prompt on its way to an answer: what was asked, and what has been generated so far.
#
# A request belongs to the event loop: the scheduler's thread reads it while a step runs, but only the loop changes it.


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
    """`changed` is called on every change while `stream` is set, and at the end in any case.

    `ended_waiting`: aborted in the queue, where SGLang knows less of it.
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

    @property
    def length(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.prompt) + len(self.output)

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
    [Span(version='7', start=0, end=2), Span(version='8', start=2, end=5)]
    """
    found: list[VersionSpan] = []
    for version, end in changes:
        start = found[-1].end if found else 0
        if found and min(end, tokens) <= start:
            continue
        if found and found[-1].version == version:
            found[-1] = VersionSpan(version, found[-1].start, min(end, tokens))
        else:
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


class KvCache:
    """Keys and values of all running requests, [layers][rows, kv_heads, positions, head_dim], padded to the longest.

    Row r holds the keys and values of the tokens at positions 0, 1, … of request r. What lies beyond a request's length
    is left over from others or from padding; no query looks there. The tensors grow by doubling and are freed by
    `clear`, so an idle engine holds nothing.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Drop everything and free the memory."""
        self._rows = self._positions = 0
        self._keys = [self._empty(0, 0) for _ in range(self._config.num_hidden_layers)]
        self._values = [self._empty(0, 0) for _ in range(self._config.num_hidden_layers)]

    def keep(self, rows: Sequence[int], length: int) -> None:
        """Make row i what row rows[i] was, in the first `length` positions only."""
        if list(rows) == list(range(len(rows))):
            return
        index = torch.tensor(rows, dtype=torch.int64)
        for part in (*self._keys, *self._values):
            part[: len(rows), :, :length] = part[index, :, :length]

    def fill(self, first: int, rows: int, length: int) -> Attend:
        """Attention for whole prompts, which writes to the cache."""
        self._reserve(first + rows, length)
        target = slice(first, first + rows)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys[layer][target, :, :length] = keys
            self._values[layer][target, :, :length] = values
            return attend_causally(layer, queries, keys, values)

        return attend

    def extend(self, positions: Tensor) -> Attend:
        """Attention for one more token a row: row i writes at positions[i] and looks at everything up to it."""
        rows, length = len(positions), int(positions.max()) + 1
        self._reserve(rows, length)
        every = torch.arange(rows)
        seen = (torch.arange(length) <= positions[:, None])[:, None, None]

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys[layer][every, :, positions] = keys[:, :, 0]
            self._values[layer][every, :, positions] = values[:, :, 0]
            past_keys = self._keys[layer][:rows, :, :length]
            past_values = self._values[layer][:rows, :, :length]
            grouped = queries.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(queries, past_keys, past_values, attn_mask=seen, enable_gqa=grouped)

        return attend

    def _reserve(self, rows: int, positions: int) -> None:
        rows = self._rows if rows <= self._rows else max(rows, 2 * self._rows)
        positions = self._positions if positions <= self._positions else max(positions, 2 * self._positions, 64)
        if (rows, positions) != (self._rows, self._positions):
            for parts in (self._keys, self._values):
                for layer, part in enumerate(parts):
                    parts[layer] = self._empty(rows, positions)
                    parts[layer][: self._rows, :, : self._positions] = part
            self._rows, self._positions = rows, positions

    def _empty(self, rows: int, positions: int) -> Tensor:
        # Zeros, not garbage: a NaN behind the mask would still poison the sum of the values.
        shape = (rows, self._config.num_key_value_heads, positions, self._config.head_dim)
        return torch.zeros(shape, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What one forward gave: for each request a token and its log-probability."""

    requests: list[GenerationRequest]
    tokens: list[int]
    logprobs: list[float]


class Runner:
    """The model, its cache and its source of randomness."""

    def __init__(self, decoder: Decoder, seed: int, *, enable_lora: bool = False) -> None:
        self.decoder = decoder
        self._adapters = AdapterRows(decoder) if enable_lora else None
        self._cache = KvCache(decoder.config, next(decoder.parameters()).dtype)
        self._rows: list[GenerationRequest] = []
        self._sampler: tuple[list[GenerationRequest], Sampler] | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def forget(self) -> None:
        """Drop the whole cache. Only while no request is running."""
        self._rows, self._sampler = [], None
        self._cache.clear()

    @torch.inference_mode()
    def prefill(self, running: Sequence[GenerationRequest], new: Sequence[GenerationRequest]) -> ForwardResult:
        """Compute the keys and values of `new` (prompt, and answer so far if it was retracted) and their next token.

        `running` are those that stay in the cache. All of `new` go through the model in one padded batch.
        """
        self._settle(running)
        lengths = [request.length for request in new]
        ids = torch.zeros((len(new), max(lengths)), dtype=torch.int64)
        for row, request in enumerate(new):
            ids[row, : lengths[row]] = torch.tensor(request.prompt + request.output)
        last = torch.tensor(lengths) - 1
        attend = self._cache.fill(len(self._rows), len(new), ids.shape[1])
        self._adapt(new)
        hidden = self.decoder.hidden(ids, torch.arange(ids.shape[1]), attend)
        self._rows += new
        return self._draw(list(new), hidden[torch.arange(len(new)), last], last)

    @torch.inference_mode()
    def decode(self, running: Sequence[GenerationRequest]) -> ForwardResult:
        self._settle(running)
        positions = torch.tensor([request.length - 1 for request in self._rows])
        ids = torch.tensor([[request.output[-1]] for request in self._rows])
        self._adapt(self._rows)
        hidden = self.decoder.hidden(ids, positions[:, None], self._cache.extend(positions))
        return self._draw(list(self._rows), hidden[:, 0], positions)

    def _adapt(self, requests: Sequence[GenerationRequest]) -> None:
        """Have the next forward's rows computed with the adapters of these requests."""
        if self._adapters is not None:
            self._adapters.rows = [request.adapter for request in requests]

    def _settle(self, running: Sequence[GenerationRequest]) -> None:
        """Make the cache rows those of `running`, in the order they have."""
        stay = set(running)
        kept = [row for row, request in enumerate(self._rows) if request in stay]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[row] for row in kept]
            self._cache.keep(kept, max((request.length for request in self._rows), default=0))

    def _draw(self, requests: list[GenerationRequest], hidden: Tensor, positions: Tensor) -> ForwardResult:
        if self._sampler is None or self._sampler[0] != requests:
            self._sampler = (requests, Sampler([request.params for request in requests], self._generator))
        tokens, logprobs = self._sampler[1].draw(self.decoder.logits(hidden), positions)
        return ForwardResult(requests, tokens.tolist(), logprobs.tolist())
