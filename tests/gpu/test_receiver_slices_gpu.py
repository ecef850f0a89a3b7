"""What a receiver keeps on its GPU of slices: each tensor can be read where it lies, by another process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.one_to_one import COLUMNS, LAYERS, NEEDED, ROWS, SIZE, OneToOne, half, one_to_one, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[OneToOne]:
    torch.zeros(1, device="cuda")
    with one_to_one(tmp_path, on_device=True) as pair:
        yield pair


def test_slices_lie_in_little_more_than_their_bytes_and_are_read_by_the_rank_from_there(pair: OneToOne) -> None:
    sizes = list[int]()
    for step in (1, 2, 3):
        there, sent = pair.goes(step, half() if step > 1 else None), weights(step)
        begins = [each.data_ptr() for each in there.values()]
        sizes.append(max(each.data_ptr() + each.nbytes for each in there.values()) - min(begins))
        assert all(each.is_cuda for each in there.values())
        if step == 1:
            assert all(torch.equal(there[name].cpu(), each) for name, each in sent.items())
            continue
        for layer in range(LAYERS):
            columns, rows = f"{layer}.columns", f"{layer}.rows"
            assert torch.equal(there[columns][:, COLUMNS // 2 :].cpu(), sent[columns][:, COLUMNS // 2 :])
            assert torch.equal(there[rows][ROWS // 2 :].cpu(), sent[rows][ROWS // 2 :])
        assert torch.equal(there["norm"].cpu(), sent["norm"])
    assert sizes[0] >= len(weights(0)) // 4 * 3 * SIZE
    assert max(sizes[1:]) <= NEEDED + SIZE


def test_after_another_need_it_has_the_whole_version_again_on_the_gpu(pair: OneToOne) -> None:
    pair.goes(1, half())
    there, sent = pair.goes(2, None), weights(2)
    assert all(torch.equal(there[name].cpu(), each) for name, each in sent.items())
