"""Boxes, placements and layouts: pure, held against torch's own splitting."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refitd_client import InvalidWeightsError
from refitd_client.sharded.layout import (
    Box,
    Claim,
    Split,
    boxes_of,
    lay_out,
    local_shape,
    run_length,
    runs,
    spread,
    tile,
    whole_box,
)

SIZES = st.integers(1, 13)
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_order(data: st.DataObject) -> None:
    """Any part of any box of any tensor."""
    shape = data.draw(SHAPES)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(start, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True)))
    end = data.draw(st.integers(0, box.count))
    begin = data.draw(st.integers(0, end))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    expected = numbers[tuple(slice(at, at + size) for at, size in zip(start, box.shape, strict=True))].reshape(-1)
    found = [at for run in runs(box, shape, begin, end) for at in range(run.at, run.at + run.end - run.begin)]
    assert found == list(expected[begin:end])
    assert all(run.end - run.begin <= run_length(box, shape) for run in runs(box, shape, begin, end))


@given(SHAPES, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=3))
def test_splits_are_those_of_torch_chunk_and_their_boxes_tile(
    shape: tuple[int, ...], mesh: list[tuple[int, int]]
) -> None:
    """Over meshes of any dimensions, with more ranks than rows."""
    mesh = [(dim % len(shape), count) for dim, count in mesh]
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    boxes: list[Box] = []
    for place in product(*(range(count) for _, count in mesh)):
        splits = [Split(dim, index, count) for (dim, count), index in zip(mesh, place, strict=True)]
        local = numbers
        for split in splits:
            parts = local.chunk(split.count, dim=split.dim)
            local = parts[split.index] if split.index < len(parts) else local.narrow(split.dim, 0, 0)
        assert local_shape(shape, splits) == tuple(local.shape)
        held = boxes_of(shape, splits)
        assert _elements(held, shape) == local.reshape(-1).tolist()
        boxes += held
    assert tile(set(boxes), shape)
    assert not tile(set(boxes[1:]), shape)


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_a_strided_split_is_what_fsdp2_makes_of_a_tensor_parallel_one(size: int, fsdp: int, tensor: int) -> None:
    """Tensor parallelism splits first, whatever the order of the mesh; also where sizes do not divide."""
    for one, other in product(range(fsdp), range(tensor)):
        splits = [Split(0, one, fsdp, stride=tensor), Split(0, other, tensor)]
        local = _chunk(_chunk(torch.arange(size), tensor, other), fsdp, one)
        assert _elements(boxes_of((size,), splits), (size,)) == local.tolist()


def test_a_strided_split_that_undoes_nothing_takes_a_part_of_each_piece() -> None:
    """As DTensor defines it."""
    assert boxes_of((8,), [Split(0, 1, 2, stride=2)]) == [Box((2,), (2,)), Box((6,), (2,))]
    assert local_shape((8,), [Split(0, 1, 2, stride=2)]) == (4,)


@pytest.mark.parametrize(
    ("boxes", "does"),
    [
        ([Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], True),
        ([Box((0, 0), (2, 4)), Box((2, 0), (1, 4))], False),
        ([Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], False),
        ([Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 2))], False),
        ([Box((0, 0), (2, 4)), Box((0, 0), (4, 4))], False),
        ([], False),
    ],
)
def test_holes_and_overlaps_are_found(boxes: list[Box], does: bool) -> None:
    """In a tensor of 4 by 4."""
    assert tile(boxes, (4, 4)) is does
    assert tile([], (4, 0))
    assert tile([Box((), ())], ())


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([[Box((0, 0), (2, 4))], [Box((2, 0), (1, 4))]], "no rank holds 4 of its 16 elements;"),
        ([[Box((0, 0), (2, 4))], [], []], "no rank holds 8 of its 16 elements, and ranks 1 and 2 have none of it;"),
        ([[Box((0, 0), (2, 4))], [], [Box((1, 0), (3, 4))]], "the parts of ranks 0 and 2 overlap;"),
        ([[Box((0, 0), (2, 4))], [whole_box((4, 4))], [Box((2, 0), (2, 4))]], "the parts of ranks 0 and 1 overlap;"),
        ([[Box((0, 0), (2, 4)), Box((2, 0), (2, 2))], [Box((2, 2), (2, 2))], []], "its parts are no grid;"),
    ],
)
def test_a_tensor_that_is_not_whole_is_named_with_what_is_missing_or_whose_parts_overlap(
    held: list[list[Box]], why: str
) -> None:
    claims = [
        [Claim(name="w", dtype="float32", shape=(4, 4), boxes=tuple(boxes), memory="w")] if boxes else []
        for boxes in held
    ]
    with pytest.raises(InvalidWeightsError, match=f"w of shape .4, 4. is not whole: {why}"):
        lay_out(claims, inventory=lambda: None, max_shard_bytes=None, check_finite=True)


def test_what_several_ranks_hold_is_shared_out_and_no_byte_is_left_out_or_written_twice() -> None:
    """Large tensors in parts, small ones in turns."""
    shapes = {"large": (1000, 300), **{f"small{number}": (10, 10) for number in range(9)}}
    claims = [
        [
            Claim(name=name, dtype="float32", shape=shape, boxes=(whole_box(shape),), memory=name)
            for name, shape in shapes.items()
        ]
        for _ in range(3)
    ]
    layout = lay_out(claims, inventory=lambda: None, max_shard_bytes=500_000, check_finite=True)
    written = {name: np.zeros(np.prod(shape), int) for name, shape in shapes.items()}
    for parts in layout.parts:
        for part in parts:
            written[part.name][part.begin : part.end] += 1
    assert all((counts == 1).all() for counts in written.values())
    load = [sum(part.end - part.begin for part in parts) for parts in layout.parts]
    assert max(load) - min(load) < 3 * 4096


def test_files_are_spread_by_size() -> None:
    """Every file once."""
    assert spread({"a": 5, "b": 3, "c": 3, "d": 1}, 2) == [["a", "d"], ["b", "c"]]
    assert spread({"a": 5}, 3) == [["a"], [], []]


def _elements(boxes: list[Box], shape: tuple[int, ...]) -> list[int]:
    return [
        at
        for box in boxes
        for run in runs(box, shape, 0, box.count)
        for at in range(run.at, run.at + run.end - run.begin)
    ]


def _chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = tensor.chunk(count)
    return parts[index] if index < len(parts) else tensor[:0]
