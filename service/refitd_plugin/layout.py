"""A delta's changes laid out for a model: all of them in a few arrays, and a table of which goes where. Pure.

A piece is what one route takes of one checkpoint tensor's changes. Pieces whose elements have one width, and indices
one width, are a group: their indices follow each other in one array and their values in another, and each piece is a
row of a table. So hundreds of tensors are written in a few operations, and all of it can be made in another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.fault import shown
from refitd_client.delta.adjacent import together
from refitd_client.delta.change import Change, Indices
from refitd_client.fingerprint import Bits
from refitd_plugin.routes import Route
from refitd_plugin.source import FullNeededError, SourceRefusedError

COLUMNS = 10
FIRST, COUNT, ADDRESS, OFFSET, BEGIN, ROW_INDEX, ROW_PLACE, COLUMN_PLACE, NUMBER, HOLDER = range(COLUMNS)
"""A row: the first of its elements in the group's arrays and how many there are; the address of the model's tensor (0
until it is known); the route's offset, begin, row_index, row_place and column_place; the piece's number and its
holder's.
"""
Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A checkpoint's tensor, and its routes into the model, or why it has none. Without any, nobody loads it."""

    dtype: str
    shape: tuple[int, ...]
    routes: tuple[Route, ...] | str


Placements = Mapping[str, PlacedTensor]
"""All tensors of a checkpoint by name. One object for each plan: what was laid by it is known by it."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceGroup:
    """See the module. `indices` are those in the checkpoint's tensors, `values` the new bits."""

    indices: Indices
    values: Bits
    table: Table


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutDelta:
    """`names` are the checkpoint's tensors of all pieces by number; `whole`: those whose route takes all of them."""

    names: Sequence[str]
    whole: Sequence[bool]
    groups: Sequence[PieceGroup]


def lay(changes: Mapping[str, Change], placements: Placements) -> LaidOutDelta:
    """Lay out changes for the model that `placements` lead into. A rank that has other slices gets fewer pieces.

    Raises:
        SourceRefusedError: a tensor is none of the model's.
        FullNeededError: a tensor cannot be changed in place.
    """
    names: list[str] = []
    whole: list[bool] = []
    kinds: dict[tuple[int, int], list[tuple[Indices, Bits, list[int]]]] = {}
    for name, change in changes.items():
        for route in _routes(name, change, placements.get(name)):
            taken = route.select(change.indices)
            indices, values = change.indices[taken], change.values[taken]
            if len(indices):
                kind = kinds.setdefault((values.itemsize, indices.itemsize), [])
                kind.append((indices, values, _row(route, len(indices), len(names))))
                names.append(name)
                whole.append(route.whole)
    return LaidOutDelta(names, whole, [_group(pieces) for pieces in kinds.values()])


def _routes(name: str, change: Change, placed: PlacedTensor | None) -> tuple[Route, ...]:
    if placed is None or (placed.dtype, tuple(placed.shape)) != (change.dtype, change.shape):
        found = "not there" if placed is None else f"{placed.dtype} {list(placed.shape)}"
        raise SourceRefusedError(
            f"the delta changes tensor {shown(name)} as {change.dtype} of shape {list(change.shape)}, and the "
            f"model's is {found}"
        )
    if isinstance(placed.routes, str):
        raise FullNeededError(f"tensor {name} cannot be changed in place, {placed.routes}: load a full version")
    return placed.routes


def _row(route: Route, count: int, number: int) -> list[int]:
    steps = [route.row_index, route.row_place, route.column_place]
    return [0, count, 0, route.offset, route.begin, *steps, number, route.holder]


def _group(pieces: Sequence[tuple[Indices, Bits, list[int]]]) -> PieceGroup:
    table = np.array([row for _, _, row in pieces], np.int64).reshape(-1, COLUMNS)
    table[1:, FIRST] = np.cumsum(table[:-1, COUNT])
    return PieceGroup(_one([each for each, _, _ in pieces]), _one([each for _, each, _ in pieces]), table)


def _one(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    there = together(arrays)
    return np.concatenate(arrays) if there is None else there


def places(row: Sequence[int], indices: Indices) -> NDArray[np.int64]:
    """Where a piece's elements lie in the model's tensor: the formula of `routes`."""
    line, column = np.divmod(indices.astype(np.int64) - row[OFFSET], row[ROW_INDEX])
    return row[BEGIN] + line * row[ROW_PLACE] + column * row[COLUMN_PLACE]


def blocks(table: Table, size: int) -> Table:
    """The same with no row of more than `size` elements."""
    pieces = -(-table[:, COUNT] // size)
    found = np.repeat(table, pieces, axis=0)
    at = (np.arange(len(found)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
    found[:, FIRST] += at
    found[:, COUNT] = np.minimum(size, found[:, COUNT] - at)
    return found
