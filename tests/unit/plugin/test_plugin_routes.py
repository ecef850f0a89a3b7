"""A route leads each element where the plan's copy puts it, and moves of memory are the plan's copies."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from refitd_client.delta import Change
from refitd_client.validation.examine import structure
from refitd_plugin.delta.in_place import BLOCK, _chunks
from refitd_plugin.delta.layout import COUNT, FIRST, NUMBER, PlacedTensor, Route, blocks, lay_out, overlap, routes_of
from refitd_plugin.memory.copy_schedule import table_of
from refitd_plugin.memory.spans import MemoryMove, joined, move_of
from refitd_plugin.update.recorder import PlanCopy

CUTS = {
    "whole": lambda model, saved: (model[2:8], saved),
    "rows": lambda model, saved: (model[1:4], saved[3:6]),
    "columns": lambda model, saved: (model[2:8, 1:4], saved[:, 4:7]),
    "one column": lambda model, saved: (model[2:8, 1:2], saved[:, 4:5]),
    "turned": lambda model, saved: (model[:8, :6].t(), saved),
    "one element": lambda model, saved: (model[3, 3:4], saved[2, 7:8]),
    "a column of a matrix": lambda model, saved: (model[2:8, 5], saved[:, 0]),
}


def perform(moves: Sequence[MemoryMove]) -> None:
    """Make moves within host memory, as a device does."""
    for move in moves:
        for row in range(move.rows):
            at = move.target + row * move.target_pitch, move.source + row * move.source_pitch
            ctypes.memmove(*at, move.width)


def pair(cut: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model's tensor, a checkpoint's, and what of the one is copied to what of the other."""
    model, saved = torch.zeros(10, 8, dtype=torch.int16), torch.arange(1, 49, dtype=torch.int16).view(6, 8)
    return model, saved, *CUTS[cut](model, saved)


def copy_of(saved: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> PlanCopy:
    offset = (source.data_ptr() - saved.data_ptr()) // 2
    return PlanCopy("w", offset, tuple(source.shape), source.stride(), target)


def taken_by(routes: tuple[Route, ...], indices: NDArray[Any]) -> NDArray[Any]:
    """Those of some indices of a tensor of 48 elements that routes take."""
    change = replace(_change(48), indices=indices, values=np.zeros(len(indices), np.uint16))
    groups = lay_out({"w": change}, {"w": PlacedTensor("BF16", (48,), routes)}).groups
    return groups[0].indices if groups else indices[:0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_each_element_goes_where_its_copy_goes(cut: str, kind: type[Any]) -> None:
    model, saved, target, source = pair(cut)
    routes = routes_of([copy_of(saved, target, source)], {"w": 48}, [torch.empty(3), model])["w"]
    assert not isinstance(routes, str)
    target.copy_(source)
    for indices in (np.arange(48, dtype=kind), np.array([0, 7, 23, 47], dtype=kind), np.array([5], dtype=kind)):
        taken = taken_by(routes, indices)
        route = routes[0]
        row, column = np.divmod(taken.astype(np.int64) - route.offset, route.row_index)
        places = route.begin + row * route.row_place + column * route.column_place
        assert model.view(-1).numpy()[places].tolist() == (taken + 1).tolist()
        assert set(taken.tolist()) == set(indices.tolist()) & {int(number) - 1 for number in source.flatten()}
    assert routes[0].whole == (cut == "whole")


def test_a_copy_of_three_dimensions_has_no_route() -> None:
    model, saved = torch.zeros(4, 4, 4), torch.zeros(6, 6, 6)
    copy = PlanCopy("w", 0, (3, 3, 3), saved[:3, :3, :3].stride(), model[:3, :3, :3])
    assert "more dimensions than two" in str(routes_of([copy], {"w": 216}, [model])["w"])


def test_a_tensor_of_the_model_with_gaps_has_no_routes() -> None:
    model, saved = torch.zeros(8, 6)[:, :4], torch.zeros(8, 4)
    copy = PlanCopy("w", 0, (8, 4), saved.stride(), model)
    assert "gaps" in str(routes_of([copy], {"w": 32}, [model])["w"])


def test_copies_over_each_other_are_seen() -> None:
    model, saved = torch.zeros(8, 4), torch.zeros(4, 4)
    rows = [PlanCopy("w", 0, (4, 4), (4, 1), model[at : at + 4]) for at in (0, 3, 4)]
    assert not overlap([rows[0], rows[2]])
    assert overlap([rows[0], rows[1]])
    columns = [PlanCopy("w", 0, (8, 2), (4, 1), model[:, at : at + 2]) for at in (0, 1, 2)]
    assert not overlap([columns[0], columns[2]])
    assert overlap(columns[:2])
    assert saved.numel()


@pytest.mark.parametrize("cut", CUTS)
def test_a_move_is_the_copy(cut: str) -> None:
    model, _, target, source = pair(cut)
    move = move_of(target, source.stride(), source.data_ptr())
    if move is None:
        assert cut == "turned"
        return
    perform([move])
    moved = model.clone()
    model.zero_()
    target.copy_(source)
    assert torch.equal(moved, model)


def test_neighbours_on_both_sides_are_one_move() -> None:
    """As experts' projections are stacked: gate and up follow each other in the file and in the model."""
    saved, model = torch.arange(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    cuts = [(40, 50, 40), (0, 10, 10), (10, 20, 20), (20, 30, 50), (60, 70, 70)]
    pairs = [(model[to : to + end - begin], saved[begin:end]) for begin, end, to in cuts]
    moves = joined(filter(None, (move_of(some, other.stride(), other.data_ptr()) for some, other in pairs)))
    assert sorted(move.nbytes for move in moves) == [40, 40, 40, 80]
    perform(moves)
    other = torch.zeros_like(model)
    for begin, end, to in cuts:
        other[to : to + end - begin] = saved[begin:end]
    assert torch.equal(model, other)


def test_a_table_of_moves_holds_for_every_file_of_its_layout(tmp_path: Path) -> None:
    """From the places of tensors in a file, wherever it is mapped; what is no single move is left over."""
    weights = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(100.0, 112.0).view(3, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    seen = structure(tmp_path.parent, tmp_path.name)
    model = torch.zeros(10, 6)
    parts = [
        ("a", model[:4], weights["a"]),
        ("b", model[4:7, :4], weights["b"]),
        ("b", model[7:, :3].t(), weights["b"][:, :3]),
    ]
    copies = [PlanCopy(name, 0, tuple(part.shape), part.stride(), target) for name, target, part in parts]
    table = table_of(copies, seen.headers)
    assert table.rest == [copies[2]]
    file = np.frombuffer((tmp_path / "model.safetensors").read_bytes(), np.uint8)
    begin = int(file.ctypes.data)
    perform([replace(move, source=begin + move.source) for move in table.moves["model.safetensors"]])
    assert torch.equal(model[:4], weights["a"])
    assert torch.equal(model[4:7, :4], weights["b"])


def test_blocks_of_a_patch_have_each_element_once() -> None:
    counts = [1, BLOCK, 3 * BLOCK + 5, 7]
    changes = {str(count): _change(count) for count in counts}
    laid = lay_out(changes, {name: PlacedTensor("BF16", (int(name),), (_whole(int(name)),)) for name in changes})
    (group,) = laid.groups
    table = blocks(group.table, BLOCK)
    assert table[:, COUNT].max() == BLOCK
    assert len(group.indices) == len(group.values) == sum(counts)
    rows = table[:, [FIRST, COUNT, NUMBER]].tolist()
    covered = [(number, at) for first, count, number in rows for at in range(first, first + count)]
    wanted = _places(counts)
    assert covered == wanted
    chunks = _chunks(table, 2**14)
    assert (chunks[0].begin, chunks[-1].end) == (0, len(wanted))
    assert all(one.end == other.begin for one, other in pairwise(chunks))


def _whole(count: int) -> Route:
    return Route(
        holder=0, offset=0, begin=0, rows=1, columns=count, row_index=count, row_place=count, column_place=1, whole=True
    )


def _change(count: int) -> Change:
    indices, values = np.arange(count, dtype=np.uint32), np.zeros(count, np.uint16)
    return Change(dtype="BF16", shape=(count,), indices=indices, values=values, base=0, result=0)


def _places(counts: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(counts).tolist()
    return [(number, at) for number, end in enumerate(ends) for at in range(end - counts[number], end)]
