"""The copies of a load as moves of memory: as few as there can be, each of them one order to the driver.

What follows each other on both sides is one move, such as the projections of an expert that are stacked. A slice of
columns is one move with two pitches. Pure: addresses in, addresses out.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refitd_plugin.strides import rows_of


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """`rows` rows of `width` bytes from address `source` to `target`; pitches are bytes from row to row."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """The stretch of memory in which it writes: the first byte, and the one after the last."""
        return self.target, self.target + (self.rows - 1) * self.target_pitch + self.width

    @property
    def nbytes(self) -> int:
        """What it moves."""
        return self.width * self.rows


def move_of(target: Any, strides: Sequence[int], source: int) -> MemoryMove | None:
    """The move into a tensor from what lies at address `source` with some strides (in elements) and is of its shape and
    dtype; None where it takes several.
    """
    size = target.element_size()
    rows = rows_of(tuple(target.shape), strides, target.stride())
    if rows is None or (rows.source_column, rows.target_column) != (1, 1):
        return None
    width = rows.columns * size
    if rows.rows == 1:
        return MemoryMove(target.data_ptr(), source, width)
    pitches = rows.target_row * size, rows.source_row * size
    if min(pitches) < width:
        return None
    return MemoryMove(target.data_ptr(), source, width, rows.rows, *pitches)


def joined(moves: Iterable[MemoryMove]) -> list[MemoryMove]:
    """The same with neighbours made one, in order of their sources. No two may write to the same place."""
    found: list[MemoryMove] = []
    for move in sorted(moves, key=lambda move: move.source):
        last = found[-1] if found else None
        if last is not None and _follows(last, move):
            found[-1] = replace(last, width=last.width + move.width)
        else:
            found.append(move)
    return found


def _follows(last: MemoryMove, move: MemoryMove) -> bool:
    ends = last.source + last.width, last.target + last.width
    return last.rows == move.rows == 1 and ends == (move.source, move.target)


def perform(moves: Sequence[MemoryMove]) -> None:
    """Make moves within host memory: what a device does, for tests."""
    for move in moves:
        for row in range(move.rows):
            at = move.target + row * move.target_pitch, move.source + row * move.source_pitch
            ctypes.memmove(*at, move.width)
