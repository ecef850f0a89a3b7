"""What is learnt: counting on in strides, modulo 16. Pure, and without torch.

A prompt is two tokens, a stride and a number: `[by 3] 7`. The answer goes on: `10 13 0 3 6 9 12 15`. Each token of an
answer is marked against the one before it, so that a slip costs one mark and not the rest, and every token's reward
is computed rather than judged. Guessing among all 32 tokens is right once in 32 times; the reward of an answer is the
mean of its marks, between 0 and 1.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUMBERS = 16
STRIDES = (1, 2, 3)
VOCABULARY = 32  # numbers, strides, and tokens that are never right
PROMPT = 2
ANSWER = 8
CHANCE = 1 / VOCABULARY


@dataclass(frozen=True, slots=True)
class Problem:
    """Count on from `start` by `stride`."""

    stride: int
    start: int

    @property
    def prompt(self) -> list[int]:
        """The token ids that pose it."""
        return [NUMBERS + STRIDES.index(self.stride), self.start]

    def solution(self) -> list[int]:
        """The answer that gets every mark."""
        return [(self.start + self.stride * place) % NUMBERS for place in range(1, ANSWER + 1)]

    def marks(self, answer: Sequence[int]) -> list[float]:
        """1 for each token that follows the one before it by the stride, else 0."""
        before = [self.start, *answer]
        return [float(_follows(*pair, self.stride)) for pair in zip(before, answer, strict=False)]


def problems(source: random.Random, count: int) -> list[Problem]:
    """Draw problems."""
    return [Problem(source.choice(STRIDES), source.randrange(NUMBERS)) for _ in range(count)]


def _follows(before: int, token: int, stride: int) -> bool:
    return before < NUMBERS and token == (before + stride) % NUMBERS
