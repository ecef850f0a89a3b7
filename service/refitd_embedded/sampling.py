"""Drawing one token for each row of a batch with its log-probability, and the settings of one request for that.

Log-probabilities are SGLang's: of the distribution after temperature; greedy rows (temperature 0) count with
temperature 1. A row with a `sampling_seed` is drawn by a number that follows from seed and position: its answer depends
neither on the rest of the batch nor on the run. (SGLang draws other numbers from the same seed.)

`sampling_params` have SGLang's names, defaults, limits and error texts. What needs a tokenizer (stop strings, grammars)
or is not computed here (top_k, top_p, penalties) is refused by name when it is set to anything but its neutral value: a
rollout must not silently sample from another distribution than the one asked for.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from refitd_client.contract.decoding import converted

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
