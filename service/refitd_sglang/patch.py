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

from refitd_client.delta.change import Change, Indices
from refitd_client.fingerprint import Bits, share
from refitd_client.fingerprint.definition import MASK
from refitd_client.fingerprint.twin import flat_bits
from refitd_sglang.routes import Route


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The changes of one checkpoint tensor that one route takes: indices in that tensor, and new bits."""

    name: str
    route: Route
    indices: Indices
    values: Bits


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


def pieces_of(name: str, change: Change, routes: Sequence[Route]) -> list[Piece]:
    """A tensor's changes, by the routes that take them. A rank that has other slices gets none."""
    pieces: list[Piece] = []
    for route in routes:
        taken = route.select(change.indices)
        pieces.append(Piece(name, route, change.indices[taken], change.values[taken]))
    return [piece for piece in pieces if len(piece.indices)]


class HostPatch:
    """Tensors in host memory, by numpy."""

    def __init__(self, pieces: Sequence[Piece], holders: Sequence[Any]) -> None:
        """`holders` are the model's tensors by the numbers that routes give; those that are named are contiguous."""
        self._pieces = pieces
        self._bits = {piece.route.holder: _bits(holders[piece.route.holder]) for piece in pieces}
        self._count = len(holders)
        self._olds: list[Bits] = []

    def look(self) -> Shifts:
        """As `Patch`."""
        self._olds = [self._bits[piece.route.holder][_places(piece)] for piece in self._pieces]
        tensors, holders = [0] * len(self._pieces), [0] * self._count
        for number, (piece, old) in enumerate(zip(self._pieces, self._olds, strict=True)):
            places = _places(piece)
            tensors[number] = _shift(piece.indices, old, piece.values)
            holders[piece.route.holder] += _shift(places.view(np.uint64), old, piece.values)
        return Shifts(tensors, [each & MASK for each in holders])

    def write(self) -> None:
        """As `Patch`."""
        for piece in self._pieces:
            self._bits[piece.route.holder][_places(piece)] = piece.values

    def undo(self) -> None:
        """As `Patch`."""
        for piece, old in zip(self._pieces, self._olds, strict=True):
            self._bits[piece.route.holder][_places(piece)] = old


def _shift(indices: Indices, old: Bits, new: Bits) -> int:
    return (share(indices, new) - share(indices, old)) & MASK


def _places(piece: Piece) -> Any:
    return piece.route.places(piece.indices)


def _bits(tensor: Any) -> Bits:
    array = flat_bits(tensor).numpy()
    return array.view(f"u{array.itemsize}")
