"""A delta is laid out bit for bit as the plain way does it: one tensor after the other is chosen, all concatenated."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd_client.delta import Change
from refitd_plugin.delta import layout
from refitd_plugin.delta.layout import COLUMNS, COUNT, FIRST, PlacedTensor, Placements, Route, lay_out
from refitd_plugin.memory.source import FullNeededError, SourceRefusedError

Matrix = tuple[int, int]
Case = tuple[dict[str, Change], dict[str, PlacedTensor]]
LARGE: Sequence[Matrix] = [(2**16 + 1, 2**16 - 1), (2**21 + 1, 2**12 - 1)]
"""As many elements as indices of 32 bits can tell apart, less one, and more than that."""


def plainly_chosen(route: Route, indices: NDArray[Any]) -> NDArray[np.int64]:
    places = indices.astype(np.int64) - route.offset
    if route.whole:
        return np.arange(len(indices))
    last = (route.rows - 1) * route.row_index + route.columns - 1
    is_in_row = places % route.row_index < route.columns if route.rows > 1 else places >= 0
    return np.flatnonzero((places >= 0) & (places <= last) & is_in_row)


def plainly_laid_out(changes: Mapping[str, Change], placements: Placements) -> tuple[Any, ...]:
    """Names, which are whole, and of each group the types and bytes of its arrays."""
    names: list[str] = []
    whole: list[bool] = []
    kinds: dict[tuple[int, int], list[Any]] = {}
    for name, change in changes.items():
        for route in placements[name].routes:
            assert isinstance(route, Route)
            chosen = plainly_chosen(route, change.indices)
            if len(chosen):
                indices, values = change.indices[chosen], change.values[chosen]
                steps = [route.row_index, route.row_place, route.column_place]
                row = [0, len(indices), 0, route.offset, route.begin, *steps, len(names), route.holder]
                kinds.setdefault((values.itemsize, indices.itemsize), []).append((indices, values, row))
                names.append(name)
                whole.append(route.whole)
    groups: list[tuple[Any, ...]] = []
    for pieces in kinds.values():
        table = np.array([row for _, _, row in pieces], np.int64).reshape(-1, COLUMNS)
        table[1:, FIRST] = np.cumsum(table[:-1, COUNT])
        arrays = [np.concatenate([piece[at] for piece in pieces]) for at in (0, 1)]
        groups.append(tuple((array.dtype.str, array.tobytes()) for array in (*arrays, table)))
    return names, whole, groups


def laid_out(changes: Mapping[str, Change], placements: Placements, allocate: Any) -> tuple[Any, ...]:
    laid = lay_out(changes, placements, allocate)
    groups = [
        tuple((array.dtype.str, array.tobytes()) for array in (group.indices, group.values, group.table))
        for group in laid.groups
    ]
    return list(laid.names), list(laid.whole), groups


def route_of(shape: Matrix, rows: tuple[int, int], columns: tuple[int, int], **more: Any) -> Route:
    """A part of a matrix, from the first row and column up to the second ones, which are not in it."""
    (top, bottom), (left, right) = rows, columns
    is_flat = right - left == shape[1]
    size = (bottom - top) * (right - left)
    ways = {"rows": 1, "columns": size} if is_flat else {"rows": bottom - top, "columns": right - left}
    is_whole = size == shape[0] * shape[1]
    more = {"holder": 0, "begin": 7, "row_place": right - left, "column_place": 1, "whole": is_whole} | more
    return Route(offset=top * shape[1] + left, row_index=shape[1], **ways, **more)


def change_of(shape: Matrix, indices: NDArray[Any], values: NDArray[Any]) -> Change:
    return Change(dtype="", shape=shape, indices=indices, values=values, base=0, result=0)


@st.composite
def spans(draw: st.DrawFn, size: int) -> tuple[int, int]:
    begin = draw(st.integers(0, size - 1))
    return begin, draw(st.integers(begin + 1, size))


@st.composite
def routes(draw: st.DrawFn, shape: Matrix) -> tuple[Route, ...]:
    found: list[Route] = []
    for number in range(draw(st.integers(0, 3))):
        rows, columns = (0, shape[0]), (0, shape[1])
        kind = draw(st.sampled_from(["whole", "rows", "columns", "block", "one"]))
        if kind in {"rows", "block"}:
            rows = draw(spans(shape[0]))
        if kind in {"columns", "block"}:
            columns = draw(spans(shape[1]))
        if kind == "one":
            row, column = draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))
            rows, columns = (row, row + 1), (column, column + 1)
        found.append(route_of(shape, rows, columns, holder=number))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tensors of a few kinds, whose changes lie together in memory, as in a file, or each by itself."""
    tensors: list[tuple[Matrix, str, str, list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 8)) | st.sampled_from(LARGE))
        elements = shape[0] * shape[1]
        kinds = ["<u4", "<u8"] if elements <= 2**32 else ["<u8"]
        changed = draw(st.sets(st.integers(0, elements - 1) | st.just(elements - 1), max_size=40))
        tensors.append((shape, draw(st.sampled_from(kinds)), draw(st.sampled_from(["<u1", "<u2"])), sorted(changed)))
    is_together = draw(st.booleans())
    files = {kind: np.zeros(400, kind) for kind in ("<u4", "<u8", "<u1", "<u2")}
    ends = dict.fromkeys(files, 0)

    def stored(kind: str, numbers: Sequence[int]) -> NDArray[Any]:
        if not is_together:
            return np.array(numbers, kind)
        begin, ends[kind] = ends[kind], ends[kind] + len(numbers)
        files[kind][begin : ends[kind]] = numbers
        return files[kind][begin : ends[kind]]

    changes: dict[str, Change] = {}
    placements: dict[str, PlacedTensor] = {}
    for number, (shape, indices, values, changed) in enumerate(tensors):
        new = [(3 * number + at) % 251 for at in range(len(changed))]
        changes[str(number)] = change_of(shape, stored(indices, changed), stored(values, new))
        placements[str(number)] = PlacedTensor("", shape, draw(routes(shape)))
    return changes, placements


@given(case=cases(), at_a_time=st.sampled_from([1, 3, 2**18]), lanes=st.sampled_from([1, 3]))
def test_a_delta_is_laid_out_as_the_plain_way_does_it(case: Case, at_a_time: int, lanes: int) -> None:
    allocated: list[NDArray[np.uint8]] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        allocated.append(np.full(size, 0xEE, np.uint8))
        return allocated[-1]

    with mock.patch.multiple(layout, _LAID_OUT=at_a_time, lanes_for=lambda jobs: min(jobs, lanes)):
        assert laid_out(*case, allocate) == plainly_laid_out(*case)
    assert all(len(memory) for memory in allocated)


@pytest.mark.parametrize("shape", LARGE)
def test_columns_of_a_tensor_of_billions_of_elements_are_told_apart(shape: Matrix) -> None:
    rows, columns = shape
    row, column = (each.ravel() for each in np.indices((3, 4)))
    numbers = np.array([0, rows // 2, rows - 1])[row] * columns + np.array([0, 5, 6, columns - 1])[column]
    indices = numbers.astype(np.uint32 if rows * columns <= 2**32 else np.uint64)
    changes = {"w": change_of(shape, indices, np.arange(12, dtype=np.uint16))}
    routes = route_of(shape, (0, rows), (0, 6)), route_of(shape, (0, rows), (6, columns))
    (group,) = lay_out(changes, {"w": PlacedTensor("", shape, routes)}).groups
    assert group.values.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert group.indices.tolist() == numbers[group.values].tolist()


def file_of(*shapes: Matrix) -> tuple[dict[str, Change], list[NDArray[Any]]]:
    """Tensors of which all elements change, and the memory that their indices and their values lie in."""
    sizes = [rows * columns for rows, columns in shapes]
    ends = np.cumsum(sizes)
    memory = [np.concatenate([np.arange(size, dtype=kind) for size in sizes]) for kind in (np.uint32, np.uint16)]
    changes = {
        str(number): change_of(shape, *(each[end - size : end] for each in memory))
        for number, (shape, size, end) in enumerate(zip(shapes, sizes, ends, strict=True))
    }
    return changes, memory


def whole(shape: Matrix) -> PlacedTensor:
    return PlacedTensor("", shape, (route_of(shape, (0, shape[0]), (0, shape[1])),))


def test_whole_tensors_that_lie_together_are_not_copied() -> None:
    changes, memory = file_of((3, 4), (2, 5))
    (group,) = lay_out(changes, {"0": whole((3, 4)), "1": whole((2, 5))}, lambda _: pytest.fail("allocates")).groups
    assert np.shares_memory(group.indices, memory[0])
    assert np.shares_memory(group.values, memory[1])


def test_chosen_elements_are_written_to_the_memory_that_is_given_and_nowhere_else() -> None:
    """A piece that is whole goes there beside others: a group has one array of indices and one of values."""
    changes, _ = file_of((3, 4), (2, 5))
    sizes: list[int] = []
    memories: list[NDArray[np.uint8]] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        sizes.append(size)
        memories.append(np.zeros(size, np.uint8))
        return memories[-1]

    halves = PlacedTensor("", (3, 4), (route_of((3, 4), (0, 3), (2, 4)),))
    (group,) = lay_out(changes, {"0": halves, "1": whole((2, 5))}, allocate).groups
    assert sizes == [16 * 4, 16 * 2]
    assert [array.ctypes.data for array in (group.indices, group.values)] == [each.ctypes.data for each in memories]
    assert group.values.tolist() == [2, 3, 6, 7, 10, 11, *range(10)]


def test_a_tensor_that_the_model_lacks_or_cannot_change_is_refused() -> None:
    changes, _ = file_of((3, 4))
    with pytest.raises(SourceRefusedError, match="not there"):
        lay_out(changes, {})
    with pytest.raises(SourceRefusedError, match=r"model's is  \[4, 3\]"):
        lay_out(changes, {"0": PlacedTensor("", (4, 3), ())})
    with pytest.raises(FullNeededError, match="it is empty"):
        lay_out(changes, {"0": PlacedTensor("", (3, 4), "it is empty")})
