"""The plan of a transfer from several senders: each receiver gets each byte that it needs, once, and no other."""

import itertools
from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.transport.schedule import (
    HeldStrip,
    Needs,
    Schedule,
    Strip,
    common,
    cut,
    everything,
    joined,
    offset_in,
    schedule,
    strip,
)


def bytes_of(each: Strip) -> list[int]:
    return [each.begin + row * each.pitch + column for row in range(each.rows) for column in range(each.width)]


strips = st.builds(
    lambda begin, width, rows, gap: strip(begin, width, rows, width + gap),
    st.integers(0, 30), st.integers(1, 9), st.integers(1, 6), st.integers(0, 7),
)  # fmt: skip


@given(strips, strips)
def test_what_two_strips_have_in_common_is_each_common_byte_once(one: Strip, other: Strip) -> None:
    found = [byte for each in common(one, other) for byte in bytes_of(each)]
    assert Counter(found) == Counter({*bytes_of(one)} & {*bytes_of(other)})
    for each in common(one, other):
        for outer in (one, other):  # rows lie in rows, at one distance: it can be copied as rows
            rows = [bytes_of(outer).index(each.begin + row * each.pitch) for row in range(each.rows)]
            assert rows == [offset_in(outer, each.begin + row * each.pitch) for row in range(each.rows)]
            assert len({after - before for before, after in itertools.pairwise(rows)}) <= 1


@given(strips, st.integers(1, 40))
def test_a_strip_is_cut_into_pieces_that_are_no_larger_and_are_all_of_it(each: Strip, most: int) -> None:
    pieces = cut(each, most)
    assert all(piece.nbytes <= most for piece in pieces)
    assert [byte for piece in pieces for byte in bytes_of(piece)] == bytes_of(each)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=20))
def test_runs_of_bytes_are_joined_to_strips_of_the_same_bytes_in_the_same_order(gaps: list[tuple[int, int]]) -> None:
    runs, at = list[tuple[int, int]](), 0
    for gap, size in gaps:
        runs.append((at + gap, size))
        at += gap + size
    expected = [byte for begin, size in runs for byte in range(begin, begin + size)]
    assert [byte for each in joined(runs) for byte in bytes_of(each)] == expected


def test_the_rows_of_a_matrix_split_by_columns_are_one_strip() -> None:
    assert joined([(4 + 16 * row, 4) for row in range(1000)]) == [Strip(4, 4, 1000, 16)]


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, list[Strip]]:
    """A matrix of bytes, cut along both dimensions as shardings cut: its rows and columns, and the parts."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return rows, columns, draw(grids_of(rows, columns))


@given(st.data(), st.lists(grids(), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 100))
def test_each_receiver_gets_each_byte_that_it_needs_once_and_no_other(
    data: st.DataObject, tensors: list[tuple[int, int, list[Strip]]], senders: int, most: int
) -> None:
    held: list[list[HeldStrip]] = [[] for _ in range(senders)]
    ends = [0] * senders
    memory: list[dict[int, tuple[int, int]]] = [{} for _ in range(senders)]
    for number, (_, _, parts) in enumerate(tensors):
        for part in parts:
            sender = data.draw(st.integers(0, senders - 1))
            held[sender].append(HeldStrip(number, part, ends[sender]))
            for place, byte in enumerate(bytes_of(part), ends[sender]):
                memory[sender][place] = number, byte
            ends[sender] += part.nbytes + 3
    sizes = [rows * columns for rows, columns, _ in tensors]
    places = [sum(sizes[:number]) + 5 * number for number in range(len(sizes))]
    needs: dict[str, Needs] = {"all": everything(sizes)}
    for name in ("a", "b"):
        needs[name] = {
            number: data.draw(st.lists(st.sampled_from(parts), unique=True, max_size=3))
            for number, (_, _, parts) in enumerate([(r, c, data.draw(grids_of(r, c))) for r, c, _ in tensors])
            if data.draw(st.booleans())
        }
    plan = schedule(held, places, needs, most)
    for name, needed in needs.items():
        expected = Counter(
            (number, byte) for number, some in needed.items() for each in some for byte in bytes_of(each)
        )
        assert Counter(arrived(plan, name, memory, places)) == expected
        assert set(expected.values()) <= {1}
    assert all(0 < block.nbytes <= most for block in plan.blocks)
    assert len({(lane.sender, lane.receivers) for lane in plan.lanes}) == len(plan.lanes)
    assert {block.lane for block in plan.blocks} == set(range(len(plan.lanes)))


@st.composite
def grids_of(draw: st.DrawFn, rows: int, columns: int) -> list[Strip]:
    across = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    along = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
    return [
        strip(top * columns + left, right - left, bottom - top, columns)
        for top, bottom in itertools.pairwise(across)
        for left, right in itertools.pairwise(along)
    ]


def arrived(
    plan: Schedule, name: str, memory: list[dict[int, tuple[int, int]]], places: list[int]
) -> list[tuple[int, int]]:
    """The bytes that a receiver gets, each checked to be the one that belongs where it goes."""
    found: list[tuple[int, int]] = []
    for block in plan.blocks:
        lane = plan.lanes[block.lane]
        if name not in lane.receivers:
            continue
        for move in block.moves:
            for row in range(move.rows):
                for column in range(move.width):
                    tensor, byte = memory[lane.sender][move.source + row * move.source_pitch + column]
                    assert move.target + row * move.target_pitch + column == places[tensor] + byte
                    found.append((tensor, byte))
    return found


def test_senders_take_turns_so_that_all_send_at_the_same_time() -> None:
    held = [[HeldStrip(0, strip(100 * sender, 100), 0)] for sender in range(3)]
    plan = schedule(held, [0], {"a": everything([300]), "b": everything([300])}, 25)
    assert [block.lane for block in plan.blocks] == [0, 1, 2] * 4
    assert [lane.receivers for lane in plan.lanes] == [("a", "b")] * 3


@pytest.mark.parametrize("shape", [(64, 48), (7, 5)])
def test_what_two_receivers_need_of_one_tensor_is_sent_to_each_alone_and_what_both_need_to_both_at_once(
    shape: tuple[int, int],
) -> None:
    rows, columns = shape
    half = columns // 2
    held = [[HeldStrip(0, strip(0, prod(shape)), 0), HeldStrip(1, strip(0, 8), prod(shape))]]
    needs: dict[str, Needs] = {
        "left": {0: [strip(0, half, rows, columns)], 1: [strip(0, 8)]},
        "right": {0: [strip(half, columns - half, rows, columns)], 1: [strip(0, 8)]},
    }
    plan = schedule(held, [0, prod(shape)], needs, 10**6)
    sent = {plan.lanes[block.lane].receivers: block.nbytes for block in plan.blocks}
    assert sent == {("left",): half * rows, ("left", "right"): 8, ("right",): (columns - half) * rows}
