"""Drawing one token for each row of a batch, and saying how likely it was.

Log-probabilities are SGLang's: of the distribution after temperature and before top_k and top_p; greedy rows
(temperature 0) count with temperature 1. A row with a `sampling_seed` is drawn by the Gumbel trick, argmax(logits +
noise), with noise from SGLang's hash of (seed, position, token): its answer depends neither on the rest of the batch
nor on the run. (With top_k or top_p SGLang's own noise goes by rank instead of token, and so draws another answer.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refitd_embedded.sampling_params import SamplingParams


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
            ids = torch.where(self._greedy, ids, self._drawn(logprobs, positions))
        return ids, logprobs.gather(-1, ids[:, None])[:, 0]

    def _drawn(self, logprobs: Tensor, positions: Tensor) -> Tensor:
        kept = self._filtered(logprobs) if self._filters else logprobs
        ids = self._by_inversion(kept)
        if len(self._seeded):
            noise = gumbel(self._seeds, positions[self._seeded], kept.shape[-1])
            ids[self._seeded] = (kept[self._seeded] + noise).argmax(-1)
        return ids

    def _by_inversion(self, logprobs: Tensor) -> Tensor:
        """One uniform number a row, looked up in the cumulated probabilities: a tenth of the cost of noise a token."""
        cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
        total = cumulated[:, -1:]
        drawn = torch.rand(total.shape, generator=self._generator, dtype=torch.float64) * total
        ids = torch.searchsorted(cumulated, drawn, right=True)[:, 0]
        return ids.clamp_(max=logprobs.shape[-1] - 1).masked_fill_(total[:, 0].isnan(), 0)

    def _filtered(self, logprobs: Tensor) -> Tensor:
        """Leave the `top_k` likeliest, and of these the likeliest whose predecessors sum to at most `top_p`."""
        ordered, order = logprobs.exp().sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = (torch.arange(ordered.shape[-1]) >= self._top_ks) | (before > self._top_ps)
        return logprobs.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
    """Make `tokens[i]` impossible in row `rows[i]`: an answer shorter than `min_new_tokens` must not stop."""
    if rows:
        logits = logits.clone()
        for row, banned in zip(rows, tokens, strict=True):
            logits[row, list(banned)] = -torch.inf
    return logits


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [rows, vocab_size] in float64, a function of seed, position and token id alone."""
    uniform = murmur32(seeds, positions, vocab_size).double() / (2**32 - 1)
    return -(-uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))).log()


def murmur32(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """SGLang's `murmur_hash32`: MurmurHash3 of the four words (seed low, seed high, position, column), as int64.

    Source: `sglang/kernels/ops/sampling/murmur_hash.py`.
    """
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    state = torch.zeros_like(seeds)
    for word in (low, high, positions):
        state = _mix(state, word)
    state = _mix(state[:, None], torch.arange(columns)[None])
    return _finish(state ^ 16)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


def _rotate(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


def _finish(state: Tensor) -> Tensor:
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16
