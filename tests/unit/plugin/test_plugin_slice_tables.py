"""What ranks find in their slices adds up to the fingerprints of whole tensors, however tensors are cut among them."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.fingerprint import bits_of, fingerprint, share
from refitd_plugin.proof.slices import (
    EngineSlices,
    EngineTable,
    SliceCheck,
    SliceSums,
    decode_sums,
    decode_table,
    encode_sums,
    encode_table,
    slice_line,
    tiles,
)
from refitd_plugin.update.ranks import RankReport, RankState

Box = tuple[int, int, int, int]


@dataclass
class Cut:
    """Matrices that are cut into boxes (first row, rows, first column, columns), each of which some ranks have."""

    ranks: int
    shapes: list[tuple[int, int]]
    boxes: list[tuple[int, Box, list[int]]]
    bits: list[np.ndarray]

    def lines(self, rank: int) -> list[tuple[int, Box]]:
        return [(tensor, box) for tensor, box, owners in self.boxes for owner in owners if owner == rank]

    def slices(self, rank: int) -> np.ndarray:
        lines: list[tuple[int, ...]] = []
        for tensor, (row, rows, column, columns) in self.lines(rank):
            wide = self.shapes[tensor][1]
            lines.append(slice_line(tensor, row * wide + column, columns, rows, wide))
        return np.array(lines, np.int64).reshape(-1, 5)

    def sums(self, rank: int) -> np.ndarray:
        found = []
        for tensor, (row, rows, column, columns) in self.lines(rank):
            part = np.ix_(range(row, row + rows), range(column, column + columns))
            indices = np.arange(self.bits[tensor].size, dtype=np.uint64).reshape(self.shapes[tensor])[part]
            found.append(share(indices.reshape(-1), np.ascontiguousarray(self.bits[tensor][part]).reshape(-1)))
        return np.array(found, np.uint64)

    @property
    def table(self) -> EngineTable:
        elements = [rows * columns for rows, columns in self.shapes]
        return EngineTable([self.slices(rank) for rank in range(self.ranks)], elements)

    @property
    def all_sums(self) -> list[np.ndarray]:
        return [self.sums(rank) for rank in range(self.ranks)]

    @property
    def names(self) -> list[str]:
        return [f"t{number}" for number in range(len(self.shapes))]

    @property
    def expected(self) -> dict[str, str]:
        prints = [fingerprint(each.reshape(-1)) for each in self.bits]
        return {name: f"{each:016x}" for name, each in zip(self.names, prints, strict=True)}


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Each matrix is halved again and again, along rows or columns, or along rows that are then put together."""
    ranks = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 700)), min_size=1, max_size=3))
    boxes: list[tuple[int, Box, list[int]]] = []
    for tensor, (rows, columns) in enumerate(shapes):
        some: list[Box] = [(0, rows, 0, columns)]
        for _ in range(draw(st.integers(0, 5))):
            row, high, column, wide = some.pop(draw(st.integers(0, len(some) - 1)))
            if draw(st.booleans()) and high > 1:
                at = draw(st.integers(1, high - 1))
                some += [(row, at, column, wide), (row + at, high - at, column, wide)]
            elif wide > 1:
                at = draw(st.integers(1, wide - 1))
                some += [(row, high, column, at), (row, high, column + at, wide - at)]
            else:
                some.append((row, high, column, wide))
        owners = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
        boxes += [(tensor, box, draw(owners)) for box in some]
    made = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = draw(st.sampled_from([1, 2, 4, 8]))
    bits = [bits_of(made.integers(0, 256, r * c * width, dtype=np.uint8), width).reshape(r, c) for r, c in shapes]
    return Cut(ranks, shapes, draw(st.permutations(boxes)), bits)


@given(cuts())
def test_the_slices_of_all_ranks_add_up_to_the_manifest_whoever_has_them(cut: Cut) -> None:
    table = cut.table
    found = table.verdict(cut.all_sums, cut.names, cut.expected, "refit.json")
    assert (found.fault, found.proved) == ("", frozenset(cut.names))


@given(cuts(), st.data())
def test_an_element_that_is_wrong_on_one_rank_is_found_whoever_has_it_right(cut: Cut, data: st.DataObject) -> None:
    tensor, box, owners = data.draw(st.sampled_from(cut.boxes))
    rank = data.draw(st.sampled_from(owners))
    expected, table, sums = cut.expected, cut.table, cut.all_sums
    cut.bits[tensor][box[0], box[2]] ^= cut.bits[tensor].dtype.type(1)
    sums[rank] = cut.sums(rank)
    fault = table.verdict(sums, cut.names, expected, "refit.json").fault
    assert f"tensor t{tensor} have" in fault
    assert ("same slice" in fault) == (len(owners) > 1)


@given(cuts(), st.data())
def test_elements_that_no_rank_has_or_that_two_slices_have_are_not_proved(cut: Cut, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(cut.boxes) - 1))
    tensor, (row, rows, column, columns), owners = cut.boxes[place]
    if data.draw(st.booleans()):
        cut.boxes.pop(place)
    elif rows * columns == 1:
        return
    else:
        cut.boxes.append((tensor, (row, 1, column, 1), owners))
    table = cut.table
    found = table.verdict(cut.all_sums, cut.names, cut.expected, "refit.json")
    assert found.fault == ""
    assert found.proved == frozenset(cut.names) - {f"t{tensor}"}


@pytest.mark.parametrize(
    ("strips", "elements", "wanted"),
    [
        ([(0, 12, 1, 0)], 12, True),
        ([(0, 5, 1, 0), (5, 7, 1, 0)], 12, True),
        ([(0, 5, 1, 0), (4, 7, 1, 0)], 12, False),
        ([(0, 5, 1, 0), (6, 7, 1, 0)], 12, False),
        ([(0, 2, 3, 4), (2, 2, 3, 4)], 12, True),
        ([(0, 2, 3, 4), (1, 2, 3, 4)], 12, False),
        ([(0, 2, 3, 4), (2, 2, 2, 4), (10, 2, 1, 0)], 12, True),
        ([(0, 2, 2, 4), (2, 2, 2, 4), (8, 4, 1, 0)], 12, True),
        ([(0, 2, 3, 4), (2, 2, 1, 0), (6, 2, 1, 0), (10, 2, 1, 0)], 12, True),
        ([(0, 6, 1, 0), (6, 2, 2, 4), (8, 2, 1, 0)], 12, True),
        ([(3, 2, 3, 4), (0, 3, 1, 0), (5, 2, 1, 0), (9, 2, 1, 0)], 12, False),  # over the edge
        ([(0, 1, 6, 2), (1, 1, 2, 4), (3, 1, 2, 4), (9, 1, 1, 0), (11, 1, 1, 0)], 12, True),  # two pitches
        ([(0, 1, 6, 2), (1, 1, 2, 4), (3, 1, 2, 4), (9, 1, 1, 0), (8, 1, 1, 0)], 12, False),
        ([(0, 2, 2, 3), (2, 1, 1, 0)], 5, True),  # rows that do not end where the tensor does
        ([(0, 2, 2, 3), (2, 2, 1, 0)], 6, False),
        ([(0, 12, 1, 0)], 11, False),
    ],
)
def test_slices_tile_a_tensor_where_each_element_is_once_in_them(
    strips: list[tuple[int, int, int, int]], elements: int, *, wanted: bool
) -> None:
    assert tiles(np.array(strips, np.int64), elements) == wanted


def test_text_of_tables_and_sums_comes_back_and_other_text_is_refused() -> None:
    table = np.array([(0, 1, 2, 3, 4), (7, 2**40, 1, 1, 0)], np.int64)
    assert decode_table(encode_table(table)).tolist() == table.tolist()
    sums = np.array([0, 2**64 - 1, 5], np.uint64)
    assert decode_sums(encode_sums(sums)).tolist() == sums.tolist()
    for text in ("", "{}", '{"table":"AAAA"}', encode_table(table)[:-9] + '"}'):
        with pytest.raises(ValueError, match="no slices"):
            decode_table(text)
    with pytest.raises(ValueError, match="base64"):
        decode_sums("one two")


def test_sums_of_another_number_than_a_ranks_slices_are_a_fault_and_no_error() -> None:
    bits = np.arange(10, dtype=np.uint16)
    mine = encode_table(np.array([(0, 0, 10, 1, 0)], np.int64))
    check = SliceCheck(
        found=SliceSums(mine, np.array([fingerprint(bits)], np.uint64)),
        names=["t"],
        elements=[10],
        expected={"t": f"{fingerprint(bits):016x}"},
        says="refit.json",
    )
    slices = EngineSlices()
    for sums in ("", encode_sums(np.array([1, 2], np.uint64)), "one two"):
        report = RankReport(rank=0, state=RankState.WRITTEN, slices=mine, sums=sums)
        assert "cannot be read" in slices.verdict([report], check).fault
