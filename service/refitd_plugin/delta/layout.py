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

`lay_out` finds which of a delta's elements the model takes, and their way to where they are to lie. Where a group's
pieces lie together in the delta, its arrays are views and nothing is copied. Elsewhere, as on ranks that hold slices,
there are two steps, each in as many threads as are worth their while:

    choose  of pieces with gaps (columns of a matrix): which of the changed elements are theirs
    fill    each chosen index and value is written once, into memory that the caller gives

What is chosen takes 8 bytes for each element, until the arrays are filled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.fault import shown
from refitd_client.delta.change import Change, Indices, together
from refitd_client.fingerprint import Bits
from refitd_client.lanes import in_lanes, lanes_for
from refitd_plugin.memory.source import FullNeededError, SourceRefusedError
from refitd_plugin.memory.spans import Covered, NamedSpans, rows_of, stretches


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

    def taken(self, indices: Indices) -> NDArray[np.intp]:
        """Which of some indices of its stretch it takes, where it has gaps.

        In the type of the indices, which all its numbers fit into then. numpy divides by one number in vectors, and
        computes a remainder one by one.
        """
        kind = indices.dtype.type
        columns = indices - kind(self.offset)
        lines = columns // kind(self.row_index)
        lines *= kind(self.row_index)
        columns -= lines
        return np.flatnonzero(columns < kind(self.columns))


Routes = Mapping[str, tuple[Route, ...] | str]
"""For each tensor of the checkpoint that is only copied: its routes, or why it has none."""


def routes_of(copies: Sequence[Any], elements: Mapping[str, int], holders: Sequence[Any]) -> Routes:
    """The routes of a plan's copies into tensors of the model. `elements`: how many elements each tensor of the
    checkpoint has, by name. `holders`: the model's tensors, by the numbers that routes give.
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


Allocate = Callable[[int], NDArray[np.uint8]]
"""Gives memory for a number of bytes."""

_LAID_OUT = 2**18  # elements of small pieces that a thread takes at once: the lock is asked for seldom
_MOST_LANES = 8  # with more, threads mostly wait for the interpreter's lock, and other ranks have work for the cores


def in_memory(size: int) -> NDArray[np.uint8]:
    """Memory of this process: the usual `Allocate`."""
    return np.empty(size, np.uint8)


@dataclass(slots=True, eq=False)  # a frozen one takes thrice as long to make, and there are hundreds
class _Piece:
    """Changes from the first to the last that a route takes of a tensor, of which it takes all, or those `taken`."""

    name: str
    route: Route
    indices: Indices
    values: Bits
    taken: NDArray[np.intp] | None = None

    def choose(self) -> None:
        self.taken = self.route.taken(self.indices)

    @property
    def count(self) -> int:
        return len(self.indices if self.taken is None else self.taken)


_Work = tuple[int, Callable[[], None]]
"""How many elements it is about, and what is to be done."""


def lay_out(changes: Mapping[str, Change], placements: Placements, allocate: Allocate = in_memory) -> LaidOutDelta:
    """Lay out changes for the model that `placements` lead into. A rank that has other slices gets fewer pieces.
    `placements`: where each tensor lies in the model. `allocate`: gives memory for those arrays of the result that are
    no views of the changes' arrays.

    Raises:
        SourceRefusedError: a tensor is none of the model's.
        FullNeededError: a tensor cannot be changed in place.
    """
    pieces = [
        _piece(name, change, route)
        for name, change in changes.items()
        for route in _routes(name, change, placements.get(name))
    ]
    _in_lanes([(len(piece.indices), piece.choose) for piece in pieces if piece.route.has_gaps])
    there = [piece for piece in pieces if piece.count]
    kinds: dict[tuple[int, int], list[tuple[int, _Piece]]] = {}
    for number, piece in enumerate(there):
        kinds.setdefault((piece.values.itemsize, piece.indices.itemsize), []).append((number, piece))
    made = [_group(numbered, allocate) for numbered in kinds.values()]
    _in_lanes([fill for _, fills in made for fill in fills])
    groups = [group for group, _ in made]
    return LaidOutDelta([piece.name for piece in there], [piece.route.whole for piece in there], groups)


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


def _piece(name: str, change: Change, route: Route) -> _Piece:
    begin, end = (0, len(change.indices)) if route.whole else route.stretch(change.indices)
    return _Piece(name, route, change.indices[begin:end], change.values[begin:end])


def _group(numbered: Sequence[tuple[int, _Piece]], allocate: Allocate) -> tuple[PieceGroup, list[_Work]]:
    """Pieces of one kind with their numbers as a group, and how its arrays are still to be filled. An array is a view
    where its pieces lie together.
    """
    pieces = [piece for _, piece in numbered]
    ends = list(accumulate(piece.count for piece in pieces))
    begins = [0, *ends[:-1]]
    arrays, fills = list[NDArray[Any]](), list[_Work]()
    for sources in ([piece.indices for piece in pieces], [piece.values for piece in pieces]):
        array = together(sources) if all(piece.taken is None for piece in pieces) else None
        if array is None:
            array = allocate(ends[-1] * sources[0].itemsize).view(sources[0].dtype)
            for piece, source, begin, end in zip(pieces, sources, begins, ends, strict=True):
                fills.append((len(source), partial(_fill, array[begin:end], source, piece.taken)))
        arrays.append(array)
    rows: list[list[int]] = []
    for (number, piece), begin in zip(numbered, begins, strict=True):
        route = piece.route
        steps = [route.row_index, route.row_place, route.column_place]
        rows.append([begin, piece.count, 0, route.offset, route.begin, *steps, number, route.holder])
    return PieceGroup(arrays[0], arrays[1], np.array(rows, np.int64)), fills


def _fill(target: NDArray[Any], source: NDArray[Any], taken: NDArray[np.intp] | None) -> None:
    if taken is None:
        target[:] = source
    else:
        source.take(taken, out=target, mode="clip")  # other modes go through memory of their own


def _in_lanes(works: Sequence[_Work]) -> None:
    """Do all work in several threads. Large work comes first, and small work shares a job."""
    jobs: list[list[Callable[[], None]]] = []
    room = -1
    for size, work in sorted(works, key=itemgetter(0), reverse=True):
        if room < size:
            jobs.append([])
            room = _LAID_OUT
        jobs[-1].append(work)
        room -= size

    def run(job: Sequence[Callable[[], None]], stop: Event) -> None:
        for work in job:
            if stop.is_set():
                return
            work()

    in_lanes([partial(run, job) for job in jobs], lanes=min(lanes_for(len(jobs)), _MOST_LANES))
