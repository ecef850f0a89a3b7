"""A delta laid out for a model: where each changed element goes. Pure, but for looking at where tensors are.

A delta says which elements changed by their flat indices in the checkpoint's tensors. The model has tensors of its own:
projections stacked to one, slices of each on each rank, matrices that are transposed. The copies of the load plan say
how one becomes the other, and a route is a copy as a formula:

    index  =  offset + row · row_index + column                     row < rows, column < columns
    place  =  begin  + row · row_place + column · column_place      in the model's tensor, counted in elements

A copy of more than two dimensions has no route: what it fills is changed by full versions only.

A piece is what one route takes of one checkpoint tensor's changes. Pieces whose elements have one width, and indices
one width, are a group: their indices follow each other in one array and their values in another, and each piece is a
row of a table. So hundreds of tensors are written in a few operations, and all of it can be made in another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta.change import Indices
from refitd_client.fingerprint import Bits
from refitd_plugin.moves import rows_of
from refitd_plugin.spans import Covered, NamedSpans, stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """See the module. `holder` is the number of the model's tensor; `whole`: it takes all elements, in their order."""

    holder: int
    offset: int
    begin: int
    rows: int
    columns: int
    row_index: int
    row_place: int
    column_place: int
    whole: bool

    @property
    def has_gaps(self) -> bool:
        """Whether elements that it does not take lie between those that it takes."""
        return self.rows > 1 and self.row_index != self.columns

    def stretch(self, indices: Indices) -> tuple[int, int]:
        """The first and the end of those of some strictly ordered indices that lie from its first element to its last.

        Without gaps these are all that it takes.
        """
        kind = indices.dtype.type
        last = self.offset + (self.rows - 1) * self.row_index + self.columns - 1
        begin = int(indices.searchsorted(kind(self.offset))) if self.offset else 0
        return begin, int(indices.searchsorted(kind(last), side="right"))

    def mark(self, indices: Indices, marks: NDArray[np.bool_]) -> None:
        """Mark which of some indices of its stretch it takes, where it has gaps.

        In the type of the indices, which all its numbers fit into then. numpy divides by one number in vectors, and
        computes a remainder one by one.
        """
        kind = indices.dtype.type
        row_index = kind(self.row_index)
        columns = indices - kind(self.offset)
        lines = columns // row_index
        lines *= row_index
        columns -= lines
        np.less(columns, kind(self.columns), out=marks)


Routes = Mapping[str, tuple[Route, ...] | str]
"""For each tensor of the checkpoint that is only copied: its routes, or why it has none."""


def routes_of(copies: Sequence[Any], elements: Mapping[str, int], holders: Sequence[Any]) -> Routes:
    """The routes of a plan's copies into tensors of the model.

    Args:
        copies: the plan's copies.
        elements: how many elements each tensor of the checkpoint has, by name.
        holders: the model's tensors, by the numbers that routes give.
    """
    known = [(number, tensor) for number, tensor in enumerate(holders) if tensor.is_contiguous()]
    at = NamedSpans((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, str(number)) for number, tensor in known)
    found: dict[str, tuple[Route, ...] | str] = {}
    for copy in copies:
        before = found.get(copy.name, ())
        route = _route(copy, elements[copy.name], at, holders)
        found[copy.name] = route if isinstance(route, str) else before if isinstance(before, str) else (*before, route)
    return found


def overlap(copies: Sequence[Any]) -> bool:
    """Whether two copies write to the same place: then their order matters, and an element may have no one place."""
    targets = [copy.target for copy in copies]
    spans = [
        span for each in targets for span in stretches(each.data_ptr(), each.element_size(), each.shape, each.stride())
    ]
    together = Covered(spans)
    return sum(end - begin for begin, end in together.spans) < sum(end - begin for begin, end in spans)


def _route(copy: Any, elements: int, at: NamedSpans, holders: Sequence[Any]) -> Route | str:
    if not copy.target.numel():
        return "it is empty"
    found = at.at(copy.begin)
    if found is None or copy.target.element_size() != holders[int(found[0])].element_size():
        return "the model's tensor that it is copied to has gaps"
    rows = rows_of(copy.shape, copy.strides, copy.target.stride())
    if rows is None or rows.source_column != 1 or rows.source_row < rows.columns:
        return "it is copied in more dimensions than two"
    begin = (copy.begin - found[1]) // copy.target.element_size()
    is_row = rows.rows == 1 and rows.target_column == 1
    return Route(
        holder=int(found[0]), offset=copy.offset, begin=begin, rows=rows.rows, columns=rows.columns,
        row_index=rows.source_row, row_place=rows.target_row, column_place=rows.target_column,
        whole=is_row and (copy.offset, rows.columns) == (0, elements),
    )  # fmt: skip


COLUMNS = 10
FIRST, COUNT, ADDRESS, OFFSET, BEGIN, ROW_INDEX, ROW_PLACE, COLUMN_PLACE, NUMBER, HOLDER = range(COLUMNS)
"""A row: the first of its elements in the group's arrays and how many there are; the address of the model's tensor (0
until it is known); the route's offset, begin, row_index, row_place and column_place; the piece's number and its
holder's.
"""
Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A checkpoint's tensor, and its routes into the model, or why it has none. An unused tensor has no routes."""

    dtype: str
    shape: tuple[int, ...]
    routes: tuple[Route, ...] | str


Placements = Mapping[str, PlacedTensor]
"""All tensors of a checkpoint by name. One object for each plan: it identifies what was laid out by it."""


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
