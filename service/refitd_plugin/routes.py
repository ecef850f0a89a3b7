"""Where the elements of a checkpoint's tensors lie in the model: the load plan, read element by element.

A delta says which elements changed by their flat indices in the checkpoint's tensors. The model has tensors of its own:
projections stacked to one, slices of each on each rank, matrices that are transposed. The copies of the plan say how
one becomes the other, and a route is a copy as a formula:

    index  =  offset + row · row_index + column                     row < rows, column < columns
    place  =  begin  + row · row_place + column · column_place      in the model's tensor, counted in elements

A copy of more than two dimensions has no route: what it fills is changed by full versions only. Pure, but for looking
at where tensors are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta.change import Indices
from refitd_plugin.spans import Covered, NamedSpans, stretches
from refitd_plugin.strides import rows_of

Places = NDArray[np.int64]


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

    def select(self, indices: Indices) -> slice | NDArray[np.int64]:
        """Which of some strictly ordered indices it takes: their positions."""
        if self.whole:
            return slice(None)
        last = self.offset + (self.rows - 1) * self.row_index + self.columns - 1
        begin = int(np.searchsorted(indices, indices.dtype.type(self.offset)))
        end = int(np.searchsorted(indices, indices.dtype.type(last), side="right"))
        if self.rows == 1 or self.row_index == self.columns:
            return slice(begin, end)
        columns = (indices[begin:end].astype(np.int64) - self.offset) % self.row_index
        return begin + np.flatnonzero(columns < self.columns)

    def places(self, indices: Indices) -> Places:
        """Where elements at some indices, all of which it takes, lie in the model's tensor."""
        row, column = np.divmod(indices.astype(np.int64) - self.offset, self.row_index)
        return self.begin + row * self.row_place + column * self.column_place


Routes = Mapping[str, tuple[Route, ...] | str]
"""For each tensor of the checkpoint that is only copied: its routes, or why it has none."""


def routes_of(copies: Sequence[Any], elements: Mapping[str, int], holders: Sequence[Any]) -> Routes:
    """The routes of a plan's copies into tensors of the model. `elements` are those of the checkpoint's tensors."""
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
    spans = [span for copy in copies for span in stretches(*_layout(copy.target))]
    together = Covered(spans)
    return sum(end - begin for begin, end in together.spans) < sum(end - begin for begin, end in spans)


def _layout(tensor: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


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
