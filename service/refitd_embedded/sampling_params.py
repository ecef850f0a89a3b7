"""The knobs of one request, read from `sampling_params` with SGLang's names, defaults, limits and error texts.

What needs a tokenizer (stop strings, grammars) or is not computed here (penalties) is refused by name when it is set to
anything but its neutral value: a rollout must not silently sample from another distribution than the one asked for.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

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
        _refuse_the_unknown(raw)
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


def _refuse_the_unknown(raw: dict[str, Any]) -> None:
    known = [*SamplingParams.__slots__, *NEUTRAL, *sorted(IGNORED)]
    for name, value in raw.items():
        if name not in known:
            raise ValueError(f"unknown field `{name}`, expected one of {', '.join(f'`{one}`' for one in known)}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ValueError(f"{name} is not supported by the embedded engine: leave it out")
