"""A real receiver process that is sent slices: it has memory for these, and each tensor can be read where it lies."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.one_to_one import COLUMNS, LAYERS, NEEDED, ROWS, SIZE, OneToOne, half, one_to_one, weights

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[OneToOne]:
    with one_to_one(tmp_path, on_device=False) as pair:
        yield pair


def test_it_has_memory_for_its_slices_and_gives_that_of_the_whole_version_back(pair: OneToOne) -> None:
    for step in (1, 2, 3):
        there = pair.goes(step, half() if step > 1 else None)
        size, taken = pair.memory
        sent = weights(step)
        if step == 1:
            assert taken >= sum(each.nbytes for each in sent.values())
            assert all(torch.equal(there[name], each) for name, each in sent.items())
            continue
        assert size <= NEEDED + SIZE
        assert taken <= NEEDED + 2**16
        for layer in range(LAYERS):
            columns, rows = f"{layer}.columns", f"{layer}.rows"
            assert torch.equal(there[columns][:, COLUMNS // 2 :], sent[columns][:, COLUMNS // 2 :])
            assert torch.equal(there[rows][ROWS // 2 :], sent[rows][ROWS // 2 :])
        assert torch.equal(there["norm"], sent["norm"])


def test_after_another_need_it_has_the_whole_version_again(pair: OneToOne) -> None:
    pair.goes(1, half())
    there, sent = pair.goes(2, None), weights(2)
    assert all(torch.equal(there[name], each) for name, each in sent.items())
