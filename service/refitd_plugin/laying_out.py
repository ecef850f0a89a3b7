"""How a delta is laid out: which of its elements the model takes, and their way to where they are to lie. Pure.

Where a group's pieces lie together in the delta, its arrays are views and nothing is copied. Elsewhere, as on ranks
that hold slices, there are two steps, each in as many threads as are worth their while:

    mark    of pieces with gaps (columns of a matrix): which of the changed elements are theirs, and how many
    fill    each chosen index and value is written once, into memory that the caller gives

Marks take a byte for each changed element of a tensor that such a piece is of, until the arrays are filled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.fault import shown
from refitd_client.delta.change import Change, Indices, together
from refitd_client.fingerprint import Bits
from refitd_client.lanes import in_lanes, lanes_for
from refitd_plugin.layout import COLUMNS, LaidOutDelta, PieceGroup, PlacedTensor, Placements, Route
from refitd_plugin.source import FullNeededError, SourceRefusedError

Allocate = Callable[[int], NDArray[np.uint8]]
"""Gives memory for a number of bytes."""

_Item = TypeVar("_Item")
_LAID_OUT = 2**18  # elements that a thread takes at once: a megabyte of indices, so the lock is asked for seldom
_MOST_LANES = 8  # with more, threads mostly wait for the interpreter's lock, and other ranks have work for the cores


def in_memory(size: int) -> NDArray[np.uint8]:
    """Memory of this process: the usual `Allocate`."""
    return np.empty(size, np.uint8)


@dataclass(slots=True, eq=False)  # a frozen one takes thrice as long to make, and there are hundreds
class _Piece:
    """Changes from the first to the last that a route takes of a tensor, in cuts of `step` elements for a thread each.
    Of each cut it takes `counts`: those that `marks` has as true, or all.
    """

    name: str
    route: Route
    indices: Indices
    values: Bits
    marks: NDArray[np.bool_] | None
    step: int
    counts: list[int]

    def cut(self, number: int) -> slice:
        return slice(number * self.step, (number + 1) * self.step)


@dataclass(slots=True, eq=False)
class _Fill:
    """One cut of a piece, and where in its group's arrays the first element goes. An array that is a view is None."""

    piece: _Piece
    cut: int
    begin: int
    indices: Indices | None
    values: Bits | None


def lay_out(changes: Mapping[str, Change], placements: Placements, allocate: Allocate = in_memory) -> LaidOutDelta:
    """Lay out changes for the model that `placements` lead into. A rank that has other slices gets fewer pieces.

    Args:
        changes: what changes, by tensor.
        placements: where each tensor lies in the model.
        allocate: gives memory for those arrays of the result that are no views of the changes' arrays.

    Raises:
        SourceRefusedError: a tensor is none of the model's.
        FullNeededError: a tensor cannot be changed in place.
    """
    pieces = [
        _piece(name, change, route)
        for name, change in changes.items()
        for route in _routes(name, change, placements.get(name))
    ]
    marking = [(piece, cut) for piece in pieces if piece.marks is not None for cut in range(len(piece.counts))]
    _in_lanes(_mark, marking, [piece.step for piece, _ in marking])
    there = [piece for piece in pieces if any(piece.counts)]
    kinds: dict[tuple[int, int], list[tuple[int, _Piece]]] = {}
    for number, piece in enumerate(there):
        kinds.setdefault((piece.values.itemsize, piece.indices.itemsize), []).append((number, piece))
    groups: list[PieceGroup] = []
    fills: list[_Fill] = []
    for numbered in kinds.values():
        group, to_fill = _group(numbered, allocate)
        groups.append(group)
        fills += to_fill
    _in_lanes(_fill, fills, [fill.piece.step for fill in fills])
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
    indices, values = change.indices, change.values
    if not route.whole:
        begin, end = route.stretch(indices)
        indices, values = indices[begin:end], values[begin:end]
    size = len(indices)
    step, counts = size, [size]
    if size > _LAID_OUT:
        cuts = -(-size // _LAID_OUT)
        step = -(-size // cuts)
        counts = [*[step] * (cuts - 1), size - (cuts - 1) * step]
    marks = np.empty(size, np.bool_) if route.has_gaps else None
    return _Piece(name, route, indices, values, marks, step, counts)


def _mark(job: tuple[_Piece, int]) -> None:
    piece, number = job
    if piece.marks is not None:
        cut = piece.cut(number)
        marks = piece.marks[cut]
        piece.route.mark(piece.indices[cut], marks)
        piece.counts[number] = int(np.count_nonzero(marks))


def _group(numbered: Sequence[tuple[int, _Piece]], allocate: Allocate) -> tuple[PieceGroup, list[_Fill]]:
    """Pieces of one kind with their numbers as a group, and how its arrays are still to be filled."""
    rows: list[list[int]] = []
    fills: list[_Fill] = []
    pieces = [piece for _, piece in numbered]
    count = sum(sum(piece.counts) for piece in pieces)
    indices, new_indices = _array([piece.indices for piece in pieces], pieces, count, allocate)
    values, new_values = _array([piece.values for piece in pieces], pieces, count, allocate)
    end = 0
    for number, piece in numbered:
        begin, route = end, piece.route
        for cut, size in enumerate(piece.counts):
            if new_indices is not None or new_values is not None:
                fills.append(_Fill(piece, cut, end, new_indices, new_values))
            end += size
        steps = [route.row_index, route.row_place, route.column_place]
        rows.append([begin, end - begin, 0, route.offset, route.begin, *steps, number, route.holder])
    return PieceGroup(indices, values, np.array(rows, np.int64).reshape(-1, COLUMNS)), fills


def _array(
    arrays: Sequence[NDArray[Any]], pieces: Sequence[_Piece], count: int, allocate: Allocate
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """One array for some pieces' elements: a view where it can be; else one that is to be filled, given twice."""
    there = together(arrays) if all(piece.marks is None for piece in pieces) else None
    if there is not None:
        return there, None
    new = allocate(count * arrays[0].itemsize).view(arrays[0].dtype)
    return new, new


def _fill(fill: _Fill) -> None:
    piece, cut = fill.piece, fill.piece.cut(fill.cut)
    place = slice(fill.begin, fill.begin + piece.counts[fill.cut])
    taken = None if piece.marks is None else np.flatnonzero(piece.marks[cut])
    for source, target in ((piece.indices, fill.indices), (piece.values, fill.values)):
        if target is None:
            continue
        if taken is None:
            target[place] = source[cut]
        else:
            source[cut].take(taken, out=target[place], mode="clip")  # other modes go through memory of their own


def _in_lanes(work: Callable[[_Item], None], items: Sequence[_Item], sizes: Sequence[int]) -> None:
    """Do some work for each item, in several threads. Large ones come first, and small ones share a job."""
    jobs: list[list[_Item]] = []
    room = -1
    for number in sorted(range(len(items)), key=sizes.__getitem__, reverse=True):
        if room < sizes[number]:
            jobs.append([])
            room = _LAID_OUT
        jobs[-1].append(items[number])
        room -= sizes[number]

    def run(job: Sequence[_Item], stop: Event) -> None:
        for item in job:
            if stop.is_set():
                return
            work(item)

    in_lanes([partial(run, job) for job in jobs], lanes=min(lanes_for(len(jobs)), _MOST_LANES))
