"""Copies within one GPU: the moves of a whole load by one launch, where the driver takes some µs to begin each.

A row of the table is a stretch of memory: the address to write to, the one to read from, and how many words of 8 bytes
it has. Stretches are as long as keep all processors of a GPU busy until the end. What is not made of such words, or
lies in rows that are apart, is left to the driver.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_plugin.moves import MemoryMove

COLUMNS = 3
WORD = 8  # bytes
_COPY_ALIGNED = 16  # bytes: what a thread moves at once
_STRETCH = 2**19  # bytes of one program


def is_plain(move: MemoryMove) -> bool:
    """Whether a move, its source an address, is one that the kernel makes."""
    return move.rows == 1 and not any(each % _COPY_ALIGNED for each in (move.target, move.source, move.width))


def stretches_of(moves: Sequence[MemoryMove]) -> NDArray[np.int64]:
    """The table of plain moves. Pure.

    Args:
        moves: their sources are addresses.

    Returns:
        Address to write to, address to read from and words of each stretch, in the order of the moves.
    """
    if not moves:
        return np.empty((0, COLUMNS), np.int64)
    places = np.array([(move.target, move.source, move.width) for move in moves], np.int64)
    counts = -(-places[:, 2] // _STRETCH)
    row = np.repeat(np.arange(len(moves)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a stretch within its move
    begin = number * _STRETCH
    size = np.minimum(places[row, 2] - begin, _STRETCH)
    return np.stack([places[row, 0] + begin, places[row, 1] + begin, size // WORD], axis=1)


class DeviceMoves:
    """Plain moves within one GPU, made ready: their table lies there, and the kernel is compiled."""

    def __init__(self, moves: Sequence[MemoryMove], device: torch.device) -> None:
        """Write down the moves. Their sources are addresses; there is at least one."""
        with torch.cuda.device(device):  # a thread begins on the first GPU, which may be another rank's
            _warm(device)
            self._table: Any = torch.from_numpy(stretches_of(moves)).to(device)

    def begin(self) -> None:
        """Begin all of them along the current stream."""
        from refitd_plugin import copy_kernel

        copy_kernel.copy(self._table)


@cache
def _warm(device: Any) -> None:
    """Have the kernel compiled before the first pause in which it is needed: with nothing to do."""
    from refitd_plugin import copy_kernel

    copy_kernel.copy(torch.zeros(1, COLUMNS, dtype=torch.int64, device=device))
