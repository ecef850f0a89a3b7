"""What a kernel is told of many tensors is enough to find the fingerprint of each: followed here by numpy."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.fingerprint import bits_of, device, fingerprint, fingerprints
from refitd_client.fingerprint.batch import FingerprintBatch
from refitd_client.fingerprint.device import Listed, Rows, grouped, whole_tensor
from refitd_client.fingerprint.host import MASK, ROW

HERE = torch.device("cpu")


def bits(dtype: torch.dtype, count: int) -> Any:
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return device.flat_bits(raw.view(dtype))


def of(tensor: Any) -> Any:
    return bits_of(tensor.view(torch.uint8).numpy(), tensor.itemsize)


def followed(rows: Rows) -> dict[int, int]:
    """Fingerprints by number, from the addresses in the table alone, as a kernel has them."""
    found: dict[int, int] = {}
    begins, width = rows.table[:, 4].contiguous(), rows.listed.width
    assert rows.owner.tolist() == (torch.searchsorted(begins, torch.arange(len(rows)), right=True) - 1).tolist()
    for row, owner in enumerate(rows.owner.tolist()):
        address, _, count, first, begin, _, _, number, *_ = rows.table[owner].tolist()
        at = (row - begin) * ROW
        size = min(ROW, count - at) * width
        raw = ctypes.string_at(address + at * width, size)
        share = fingerprint(np.frombuffer(raw, f"u{width}"), first=first + at)
        found[number] = (found.get(number, 0) + share) & MASK
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_of_many_tensors_add_up_to_the_fingerprint_of_each(dtype: torch.dtype) -> None:
    """Of one element, of whole rows, of some more, of none, and of what no 16 bytes begin with."""
    torch.manual_seed(0)
    tensors = [bits(dtype, count) for count in (1, ROW, 3 * ROW + 17, 0, 64 * ROW)] + [bits(dtype, 2 * ROW + 1)[1:]]
    parts = [whole_tensor(number, each) for number, each in enumerate(tensors)]
    found = {number: each for some in grouped(parts) for number, each in followed(Rows(some, HERE)).items()}
    assert found == {number: fingerprint(of(each)) for number, each in enumerate(tensors) if each.numel()}


def test_what_is_not_finite_is_counted_only_where_a_rule_is_given() -> None:
    tensor = bits(torch.bfloat16, ROW)
    plain, ruled = whole_tensor(0, tensor), whole_tensor(1, tensor, rule_of("BF16"))
    assert [Listed(parts).has_rules for parts in ([plain], [ruled], [plain, ruled])] == [False, True, True]


def test_a_batch_sees_what_its_tensors_hold_at_each_call() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300), torch.randn(40, 30).T, torch.zeros(0), torch.randn(5, dtype=torch.bfloat16)]
    batch = FingerprintBatch(tensors)
    for _ in range(2):
        assert batch.fingerprints() == fingerprints(tensors)
        begun = batch.begin()
        assert batch.end(begun) == fingerprints(tensors)
        tensors[0] += 1
