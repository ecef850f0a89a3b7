"""The key-value cache of all running requests, padded to the longest, one row a request.

Row r holds the keys and values of the tokens at positions 0, 1, … of request r. What lies beyond a request's length is
left over from others or from padding; no query looks there. The tensors grow by doubling and are given back by
`clear`, so an idle engine holds nothing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows
from torch import Tensor

from refitd_embedded.config import DecoderConfig
from refitd_embedded.model import Attend, attend_causally


class KvCache:
    """Keys and values, [layers][rows, kv_heads, positions, head_dim]."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._rows = self._positions = 0
        self._keys = [self._empty(0, 0) for _ in range(self._config.num_hidden_layers)]
        self._values = [self._empty(0, 0) for _ in range(self._config.num_hidden_layers)]

    def keep(self, rows: Sequence[int], length: int) -> None:
        """Let row i be what row rows[i] was, looking at the first `length` positions only."""
        if list(rows) == list(range(len(rows))):
            return
        index = torch.tensor(rows, dtype=torch.int64)
        for part in (*self._keys, *self._values):
            part[: len(rows), :, :length] = part[index, :, :length]

    def fill(self, first: int, rows: int, length: int) -> Attend:
        """Attention for whole prompts: rows [first, first + rows), positions [0, length). Writes and attends."""
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
            self._keys = [self._grown(part, rows, positions) for part in self._keys]
            self._values = [self._grown(part, rows, positions) for part in self._values]
            self._rows, self._positions = rows, positions

    def _grown(self, part: Tensor, rows: int, positions: int) -> Tensor:
        grown = self._empty(rows, positions)
        grown[: self._rows, :, : self._positions] = part
        return grown

    def _empty(self, rows: int, positions: int) -> Tensor:
        # Zeros, not garbage: a NaN behind the mask would still poison the sum of the values.
        shape = (rows, self._config.num_key_value_heads, positions, self._config.head_dim)
        return torch.zeros(shape, dtype=self._dtype)
