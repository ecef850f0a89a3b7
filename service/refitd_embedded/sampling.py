"""Drawing one token for each row of a batch with its log-probability, and the settings of one request for that.

Log-probabilities are SGLang's: of the distribution after temperature and before top_k and top_p; greedy rows
(temperature 0) count with temperature 1. A row with a `sampling_seed` is drawn by the Gumbel trick, argmax(logits +
noise), with noise from SGLang's hash of (seed, position, token): its answer depends neither on the rest of the batch
nor on the run. (With top_k or top_p SGLang's own noise goes by rank instead of token, and so draws another answer.)

`sampling_params` have SGLang's names, defaults, limits and error texts. What needs a tokenizer (stop strings, grammars)
or is not computed here (penalties) is refused by name when it is set to anything but its neutral value: a rollout must
not silently sample from another distribution than the one asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

ALL = 1 << 30
"""`top_k` that leaves every token in, SGLang's TOP_K_ALL."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "min_p": (None, 0),
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

IGNORED = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "n"}
"""About text, or dealt with elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn. `max_new_tokens` None means: as long as the context allows."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, rather than one drawn."""
        return self.top_k == 1

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "SamplingParams":
        """Read a request's `sampling_params`. Raises ValueError."""
        known = [*cls.__slots__, *NEUTRAL, *sorted(IGNORED)]
        for name, value in raw.items():
            if name not in known:
                raise ValueError(f"unknown field `{name}`, expected one of {', '.join(f'`{one}`' for one in known)}")
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by the embedded engine: leave it out")
        given = {name: value for name, value in raw.items() if name in cls.__slots__}
        # A null means the default, but for max_new_tokens, where it means no limit.
        given = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        try:
            params = msgspec.convert(given, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(f"sampling_params: {problem}") from problem
        return params.normalised().checked()

    def normalised(self) -> "SamplingParams":
        """Temperature 0 as top_k 1, top_k -1 as everything."""
        if 0 <= self.temperature < 1e-6:
            return replace(self, temperature=1.0, top_k=1)
        return replace(self, top_k=ALL) if self.top_k == -1 else self

    def checked(self) -> "SamplingParams":
        """These, if they are within SGLang's limits. Raises ValueError."""
        limit = self.max_new_tokens
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k < 1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        if limit is not None and limit < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {limit}.")
        if self.min_new_tokens < 0 or (limit is not None and self.min_new_tokens > limit):
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {self.min_new_tokens}.")
        if self.sampling_seed is not None and not -(2**63) <= self.sampling_seed < 2**63:
            raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {self.sampling_seed}.")
        return self


class Sampler:
    """Draws for one composition of a batch. `generator` is the source of unseeded noise."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, generator: torch.Generator) -> None:
        self._generator = generator
        self._greedy = torch.tensor([one.greedy for one in params])
        self._all_greedy = all(one.greedy for one in params)
        self._temperatures = torch.tensor([one.temperature for one in params])[:, None]
        self._filters = any(not one.greedy and (one.top_p < 1 or one.top_k < vocab_size) for one in params)
        self._top_ps = torch.tensor([one.top_p for one in params])[:, None]
        self._top_ks = torch.tensor([one.top_k for one in params])[:, None]
        self._seeded = torch.tensor([row for row, one in enumerate(params) if one.sampling_seed is not None])
        self._seeds = torch.tensor([one.sampling_seed for one in params if one.sampling_seed is not None])

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
        kept = logprobs
        if self._filters:  # the `top_k` likeliest, and of these those whose predecessors sum to at most `top_p`
            ordered, order = logprobs.exp().sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            dropped = (torch.arange(ordered.shape[-1]) >= self._top_ks) | (before > self._top_ps)
            kept = logprobs.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        # One uniform number a row, looked up in the cumulated probabilities: a tenth of the cost of noise a token.
        cumulated = kept.exp().cumsum(-1, dtype=torch.float64)
        total = cumulated[:, -1:]
        drawn = torch.rand(total.shape, generator=self._generator, dtype=torch.float64) * total
        ids = torch.searchsorted(cumulated, drawn, right=True)[:, 0]
        ids = ids.clamp_(max=kept.shape[-1] - 1).masked_fill_(total[:, 0].isnan(), 0)
        if len(self._seeded):
            noise = gumbel(self._seeds, positions[self._seeded], kept.shape[-1])
            ids[self._seeded] = (kept[self._seeded] + noise).argmax(-1)
        return ids


def forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
    """Make tokens impossible: an answer shorter than `min_new_tokens` must not stop.

    Args:
        logits: [rows, vocab].
        rows: the rows to change.
        tokens: for each of `rows`, the token ids.
    """
    if rows:
        logits = logits.clone()
        for row, banned in zip(rows, tokens, strict=True):
            logits[row, list(banned)] = -torch.inf
    return logits


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [rows, vocab_size] in float64, a function of seed, position and token id alone.

    Args:
        seeds: int64, [rows].
        positions: int64, [rows].
        vocab_size: how many tokens there are.
    """
    uniform = murmur32(seeds, positions, vocab_size).double() / (2**32 - 1)
    return -(-uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))).log()


def murmur32(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """SGLang's `murmur_hash32`: MurmurHash3 of the four words (seed low, seed high, position, column), as int64.

    Source: `sglang/kernels/ops/sampling/murmur_hash.py`.

    Args:
        seeds: int64, [rows].
        positions: int64, [rows].
        columns: how many columns the result has.
    """
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    state = torch.zeros_like(seeds)
    for word in (low, high, positions):
        state = _mix(state, word)
    state = _mix(state[:, None], torch.arange(columns)[None])
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


def _rotate(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF
