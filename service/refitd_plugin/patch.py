"""Changed elements on their way into a model's tensors, in place: looked at, written, and taken back.

    look    what is there now is read and kept, and what the change does to fingerprints is computed; nothing is written
    write   the new values
    undo    exactly those elements get back what `look` found

Here for tensors in host memory; `device_patch.py` is the same on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from refitd_client.delta.change import Indices
from refitd_client.fingerprint import Bits, share
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.torch_ops import flat_bits
from refitd_plugin.layout import COUNT, FIRST, HOLDER, NUMBER, LaidOutDelta, PieceGroup, places


@dataclass(frozen=True, slots=True)
class Shifts:
    """What a change adds to fingerprints (mod 2^64): of each piece's checkpoint tensor, and of each of the model's."""

    pieces: Sequence[int]
    holders: Sequence[int]


class Patch(Protocol):
    """See the module. `look` comes first."""

    def look(self) -> Shifts:
        """Read what is there."""
        ...

    def write(self) -> None:
        """Write what is to be there. When this returns the device has done it."""
        ...

    def undo(self) -> None:
        """Write what was there. When this returns the device has done it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One row of a table, with its elements."""

    number: int
    holder: int
    indices: Indices
    values: Bits
    places: Any


class HostPatch:
    """Tensors in host memory, by numpy."""

    def __init__(self, laid: LaidOutDelta, holders: Sequence[Any]) -> None:
        """`holders` are the model's tensors by the numbers that routes give; those that are named are contiguous."""
        self._pieces = [piece for group in laid.groups for piece in _pieces(group)]
        self._bits = {piece.holder: _bits(holders[piece.holder]) for piece in self._pieces}
        self._count = len(holders)
        self._olds: list[Bits] = []

    def look(self) -> Shifts:
        self._olds = [self._bits[piece.holder][piece.places] for piece in self._pieces]
        tensors, holders = [0] * len(self._pieces), [0] * self._count
        for piece, old in zip(self._pieces, self._olds, strict=True):
            tensors[piece.number] = _shift(piece.indices, old, piece.values)
            holders[piece.holder] += _shift(piece.places.view(np.uint64), old, piece.values)
        return Shifts(tensors, [each & MASK for each in holders])

    def write(self) -> None:
        for piece in self._pieces:
            self._bits[piece.holder][piece.places] = piece.values

    def undo(self) -> None:
        for piece, old in zip(self._pieces, self._olds, strict=True):
            self._bits[piece.holder][piece.places] = old


def _pieces(group: PieceGroup) -> list[_Piece]:
    found: list[_Piece] = []
    for row in group.table.tolist():
        some = slice(row[FIRST], row[FIRST] + row[COUNT])
        indices = group.indices[some]
        found.append(_Piece(row[NUMBER], row[HOLDER], indices, group.values[some], places(row, indices)))
    return found


def _shift(indices: Indices, old: Bits, new: Bits) -> int:
    return (share(indices, new) - share(indices, old)) & MASK


def _bits(tensor: Any) -> Bits:
    array = flat_bits(tensor).numpy()
    return array.view(f"u{array.itemsize}")
