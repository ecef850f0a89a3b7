"""One forward of the model for all running requests at once. Blocking: the scheduler calls it in a thread.

The runner knows which request sits in which cache row. It is told on every call which requests are running, and
drops the rows of those that are not among them any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refitd_embedded.cache import KvCache
from refitd_embedded.model import Decoder
from refitd_embedded.request import Request
from refitd_embedded.sampling import Sampler, forbid


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward gave: for each request a token, its log-probability, and those of the prompt if wanted."""

    requests: list[Request]
    tokens: list[int]
    logprobs: list[float]
    input_logprobs: dict[str, list[float]]


class Runner:
    """The model, its cache and its source of randomness. `eos` are the tokens that end an answer."""

    def __init__(self, decoder: Decoder, eos: frozenset[int], seed: int) -> None:
        self.decoder, self._eos = decoder, eos
        self._dtype = next(decoder.parameters()).dtype
        self._cache = KvCache(decoder.config, self._dtype)
        self._rows: list[Request] = []
        self._sampler: tuple[list[Request], Sampler] | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def forget(self) -> None:
        """Drop the whole cache. Only while no request is running."""
        self._rows, self._sampler = [], None
        self._cache.clear()

    @torch.inference_mode()
    def prefill(self, running: Sequence[Request], new: Sequence[Request]) -> Step:
        """Compute the keys and values of `new` (prompt, and answer so far if it was retracted) and their next token.

        `running` are those that stay in the cache. All of `new` go through the model in one padded batch.
        """
        self._settle(running)
        ids, last = _padded([request.prompt + request.output for request in new])
        attend = self._cache.fill(len(self._rows), len(new), ids.shape[1])
        hidden = self.decoder.hidden(ids, torch.arange(ids.shape[1]), attend)
        self._rows += new
        inputs = {request.rid: self._input_logprobs(request, hidden[row]) for row, request in enumerate(new)}
        tokens, logprobs = self._draw(list(new), hidden[torch.arange(len(new)), last], last)
        return Step(list(new), tokens, logprobs, {rid: found for rid, found in inputs.items() if found is not None})

    @torch.inference_mode()
    def decode(self, running: Sequence[Request]) -> Step:
        """One more token for each running request."""
        self._settle(running)
        positions = torch.tensor([request.length - 1 for request in self._rows])
        ids = torch.tensor([[request.output[-1]] for request in self._rows])
        hidden = self.decoder.hidden(ids, positions[:, None], self._cache.extend(positions))
        tokens, logprobs = self._draw(self._rows, hidden[:, 0], positions)
        return Step(list(self._rows), tokens, logprobs, {})

    def _settle(self, running: Sequence[Request]) -> None:
        """Make the cache rows those of `running`, in the order they have."""
        stay = set(running)
        kept = [row for row, request in enumerate(self._rows) if request in stay]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[row] for row in kept]
            self._cache.keep(kept, max((request.length for request in self._rows), default=0))

    def _draw(self, requests: list[Request], hidden: Tensor, positions: Tensor) -> tuple[list[int], list[float]]:
        logits = self._without_early_stops(requests, self.decoder.logits(hidden))
        tokens, logprobs = self._sampler_for(requests).draw(logits, positions)
        return tokens.tolist(), logprobs.tolist()

    def _sampler_for(self, requests: list[Request]) -> Sampler:
        if self._sampler is None or self._sampler[0] != requests:
            params = [request.params for request in requests]
            self._sampler = (list(requests), Sampler(params, self.decoder.config.vocab_size, self._generator))
        return self._sampler[1]

    def _without_early_stops(self, requests: list[Request], logits: Tensor) -> Tensor:
        early = [row for row, one in enumerate(requests) if len(one.output) < one.params.min_new_tokens]
        return forbid(logits, early, [sorted(self._eos | requests[row].params.stop_token_ids) for row in early])

    def _input_logprobs(self, request: Request, hidden: Tensor) -> list[float] | None:
        """Of the prompt's tokens after `logprob_start`, at temperature 1, as SGLang has them."""
        if not request.wants_input_logprobs:
            return None
        start, end = request.logprob_start, len(request.prompt) - 1
        if start >= end:
            return []
        logprobs = self.decoder.logits(hidden[start:end]).float().log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(request.prompt[start + 1 :])[:, None])[:, 0].tolist()


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows padded on the right with zeros, and the index of each row's last token."""
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids, torch.tensor([len(row) - 1 for row in rows])
