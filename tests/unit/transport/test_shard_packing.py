"""Where a receiver keeps slices: in little more than their bytes, each tensor in its own layout, none over another."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.transport.needs import FlatLayout, PackedPlaces, packed_layout
from refitd_client.transport.offer import side_by_side
from refitd_client.transport.schedule import HeldStrip, Strip, everything, schedule, strip
from refitd_client.transport.script import BLOCK_BYTES, script_of

ROWS, COLUMNS = 64, 512  # of the matrices below, in bytes
SIZE = ROWS * COLUMNS


def bytes_of(each: Strip) -> list[int]:
    return [each.begin + row * each.pitch + at for row in range(each.rows) for at in range(each.width)]


def needed(needs: Mapping[int, Sequence[Strip]]) -> int:
    return sum(each.nbytes for strips in needs.values() for each in strips)


def columns(rank: int, ranks: int) -> Strip:
    return strip(rank * COLUMNS // ranks, COLUMNS // ranks, ROWS, COLUMNS)


def rows(rank: int, ranks: int) -> Strip:
    return strip(rank * SIZE // ranks, SIZE // ranks)


@pytest.mark.parametrize(("rank", "ranks"), [(rank, ranks) for ranks in (2, 4, 8) for rank in range(ranks)])
def test_a_rank_of_tensor_parallelism_has_memory_for_its_share_and_less_than_two_matrices_more(
    rank: int, ranks: int
) -> None:
    """Eight layers: three matrices cut by rows, one by columns, a norm that is needed whole."""
    needs: dict[int, list[Strip]] = {}
    for layer in range(8):
        first = 5 * layer
        needs |= {first + number: [rows(rank, ranks)] for number in range(3)}
        needs |= {first + 3: [columns(rank, ranks)], first + 4: [strip(0, 64)]}
    layout = packed_layout([64 if number % 5 == 4 else SIZE for number in range(40)], needs)
    assert needed(needs) <= layout.nbytes < needed(needs) + 2 * SIZE


def test_experts_of_other_ranks_take_nothing() -> None:
    layout = packed_layout([SIZE] * 64, {number: [strip(0, SIZE)] for number in range(8, 16)})
    assert layout.nbytes == 8 * SIZE


def test_two_halves_that_are_stacked_in_one_tensor_leave_their_gap_to_another_layer() -> None:
    """Gate and up in one matrix, cut by rows: each rank has two runs of it."""
    stacked = [strip(0, SIZE // 4, 2, SIZE // 2)]
    layout = packed_layout([SIZE] * 8, dict.fromkeys(range(8), stacked))
    assert layout.nbytes <= needed(dict.fromkeys(range(8), stacked)) + SIZE


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], dict[int, list[Strip]]]:
    """Tensors of a few shapes, with needs of every kind: none, all, rows, columns, several of them."""
    sizes, needs = list[int](), dict[int, list[Strip]]()
    shapes = draw(st.lists(st.sampled_from([(192, 3), (512, 4), (1024, 2), (130, 5), (8, 2)]), min_size=1, max_size=2))
    begins, widths = draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([1, 2]))  # in quarters of a row
    for number in range(draw(st.integers(1, 7))):
        pitch, count = draw(st.sampled_from(shapes))
        sizes.append(draw(st.sampled_from([0, pitch * count])) if draw(st.booleans()) else pitch * count)
        if not sizes[-1]:
            continue
        kind = draw(st.sampled_from(["none", "all", "rows", "columns", "two"]))
        begin, width = begins * pitch // 4, widths * pitch // 4
        match kind:
            case "all":
                needs[number] = [strip(0, sizes[-1])]
            case "rows":
                first = draw(st.integers(0, count - 1))
                needs[number] = [strip(first * pitch, draw(st.integers(1, count - first)) * pitch)]
            case "columns":
                needs[number] = [strip(begin, width, count, pitch)]
            case "two":
                needs[number] = [strip(begin, width), strip((count - 1) * pitch + begin, width)]
            case _:
                pass
    return sizes, needs


@given(cases())
def test_no_two_needed_bytes_have_one_place_and_each_tensor_lies_within(
    case: tuple[list[int], dict[int, list[Strip]]],
) -> None:
    sizes, needs = case
    layout = packed_layout(sizes, needs)
    places = [
        layout.offsets[tensor] + at for tensor, strips in needs.items() for each in strips for at in bytes_of(each)
    ]
    assert len(set(places)) == len(places)
    for at, size in zip(layout.offsets, sizes, strict=True):
        assert at >= 0
        assert at % 64 == 0
        assert at + size <= layout.nbytes


@given(cases())
def test_a_script_brings_each_needed_byte_to_its_place_in_packed_memory(
    case: tuple[list[int], dict[int, list[Strip]]],
) -> None:
    """Blocks are planned for memory that has the whole version. What arrives elsewhere is the same."""
    sizes, needs = case
    offsets, nbytes = side_by_side(sizes)
    whole = FlatLayout(offsets=tuple(offsets), sizes=tuple(sizes), nbytes=nbytes)
    held = [[HeldStrip(tensor, each, offsets[tensor]) for tensor, some in everything(sizes).items() for each in some]]
    plan = schedule(held, offsets, {"a": needs}, BLOCK_BYTES["gloo"])
    places = PackedPlaces(whole=whole, packed=packed_layout(sizes, needs))
    script = places.of(script_of(plan, "a"))
    assert script.fault(places.packed.nbytes) is None
    version = [(tensor, at) for tensor, size in enumerate(sizes) for at in range(size)]
    source = {offsets[tensor] + at: (tensor, at) for tensor, at in version}
    arrived: dict[int, tuple[int, int]] = {}
    for block, mine in zip(plan.blocks, script.blocks, strict=True):
        for move, (offset, pitch, width, count) in zip(block.moves, mine.moves, strict=True):
            for row in range(count):
                for at in range(width):
                    arrived[offset + row * pitch + at] = source[move.source + row * move.source_pitch + at]
    expected = {
        places.packed.offsets[tensor] + at: (tensor, at)
        for tensor, strips in needs.items() for each in strips for at in bytes_of(each)
    }  # fmt: skip
    assert arrived == expected
