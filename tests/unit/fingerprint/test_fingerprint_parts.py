"""What parts of a tensor add to its fingerprint: together the fingerprint of the whole, however it was cut."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.checkpoint.finite import rule_of
from refitd_client.fingerprint import fingerprints
from refitd_client.fingerprint import tensors as fingerprint_parts
from refitd_client.fingerprint.device import INTEGERS
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import ElementRows, PartInput, part_scans

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


def values(count: int, width: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(count)
    return torch.randint(0, 255, (count * width,), dtype=torch.uint8, generator=made).view(DTYPES[width])


def rectangle(tensor: torch.Tensor, rows: slice, columns: slice, width: int) -> PartInput:
    """A part of a matrix, as a rank that has nothing else would give it."""
    part = tensor[rows, columns].contiguous().view(-1).view(INTEGERS[width])
    begin, pitch = rows.start * tensor.shape[1] + columns.start, tensor.shape[1]
    place = ElementRows(begin, columns.stop - columns.start, rows.stop - rows.start, pitch)
    return PartInput(part, [place])


@given(
    st.sampled_from([(3, 5), (1, 9000), (130, 700), (9, 4096), (2, 70_001)]),
    st.sampled_from([*DTYPES]),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_parts_of_a_matrix_add_up_to_its_fingerprint(
    shape: tuple[int, int], width: int, across: float, along: float
) -> None:
    tensor = values(prod(shape), width).view(shape)
    row, column = int(shape[0] * across), int(shape[1] * along)
    parts = [
        rectangle(tensor, rows, columns, width)
        for rows in (slice(0, row), slice(row, shape[0]))
        for columns in (slice(0, column), slice(column, shape[1]))
        if rows.stop > rows.start and columns.stop > columns.start
    ]
    assert sum(scan.fingerprint for scan in part_scans(parts)) & MASK == fingerprints([tensor])[0]


def test_a_part_of_several_rows_of_blocks_counts_each_in_its_place() -> None:
    tensor = values(5000, 2)
    bits = tensor.view(torch.int16)
    part = PartInput(torch.cat([bits[100:300], bits[4000:4900]]), [ElementRows(100, 200), ElementRows(4000, 900)])
    rest = PartInput(
        torch.cat([bits[:100], bits[300:4000], bits[4900:]]),
        [ElementRows(0, 100), ElementRows(300, 3700), ElementRows(4900, 100)],
    )
    assert sum(scan.fingerprint for scan in part_scans([part, rest])) & MASK == fingerprints([tensor])[0]


@pytest.mark.parametrize("long", [10, 100_000])
def test_two_elements_that_have_changed_places_are_seen(long: int) -> None:
    bits = torch.arange(long, dtype=torch.int32)
    before = part_scans([PartInput(bits, [ElementRows(4095, long)])])
    bits[[1, 7]] = bits[[7, 1]]
    assert part_scans([PartInput(bits, [ElementRows(4095, long)])]) != before


def test_values_that_are_not_finite_are_counted_in_each_part() -> None:
    tensor = torch.ones(10)
    tensor[[2, 8, 9]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    bits = tensor.view(torch.int32)
    parts = [
        PartInput(bits[:5], [ElementRows(0, 5)], rule_of("F32")),
        PartInput(bits[5:], [ElementRows(5, 5)], rule_of("F32")),
    ]
    assert [scan.nonfinite for scan in part_scans(parts)] == [1, 2]


@pytest.mark.parametrize("at_once", [2**22, 1000, 7])
def test_torch_operations_find_on_any_device_what_the_host_finds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_parts, "_AT_ONCE", at_once)
    monkeypatch.setattr(fingerprint_parts, "has_triton", lambda: False)
    matrix, other = values(37 * 211, 2).view(37, 211), values(5000, 4)
    bits, rule = other.view(torch.int32), rule_of("F32")
    some = [
        rectangle(matrix, slice(0, 20), slice(0, 100), 2),
        PartInput(torch.cat([bits[100:300], bits[4000:4900]]), [ElementRows(100, 200), ElementRows(4000, 900)], rule),
        PartInput(bits[:0], [], rule),
        rectangle(matrix, slice(20, 37), slice(100, 211), 2),
        PartInput(bits[:100], [ElementRows(0, 100)]),
    ]
    assert fingerprint_parts._parts_on_device(some) == part_scans(some)
