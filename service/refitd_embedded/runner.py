"""One forward of the model for all running requests at once, with their key-value cache. Blocking: it runs in a thread.

The runner knows which request sits in which cache row. Every call names the running requests, and drops the rows of
all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from refitd_embedded.config import DecoderConfig
from refitd_embedded.lora import AdapterRows
from refitd_embedded.model import Attend, Decoder, attend_causally
from refitd_embedded.request import GenerationRequest
from refitd_embedded.sampling import Sampler


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
        """Attention for whole prompts, which writes to the cache.

        Args:
            first: the first row.
            rows: how many rows.
            length: positions from 0 on.
        """
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
        """One more token for each running request."""
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
