"""A rank's tensors are read in pieces by several threads, all of which have ended when reading has."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from refitd_client.sharded.follower import PIECE_BYTES, Reader
from refitd_client.sharded.parts import not_finite_here


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """One with several threads, however many processors there are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    return Reader(ranks=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("count", [1, 1000, 5_000_001])
def test_every_element_comes_once_cast_and_with_its_number(reader: Reader, dtype: str, count: int) -> None:
    """From within a tensor, small and large."""
    flat = torch.arange(count + 9, dtype=torch.float32)
    kind = getattr(torch, dtype)
    expected = flat[4 : 4 + count].to(kind).view(torch.uint8).numpy()
    found = np.zeros_like(expected)

    def use(first: int, data: NDArray[np.uint8]) -> int:
        assert len(data) <= PIECE_BYTES
        found[(first - 4) * kind.itemsize :][: len(data)] = data
        return len(data)

    assert reader.read(flat, 4, 4 + count, dtype, use) == len(expected)
    assert np.array_equal(found, expected)
    reader.close()


def test_an_error_in_one_thread_ends_the_others_before_it_is_raised(reader: Reader) -> None:
    """They write to files that the caller closes then."""
    working, most = 0, 0
    turn, together = threading.Lock(), threading.Barrier(4, timeout=30)

    def use(first: int, _: NDArray[np.uint8]) -> int:
        nonlocal working, most
        with turn:
            working += 1
            most = max(most, working)
        if first % (2**20) == 0 and first < 4 * 2**20:
            together.wait()
        with turn:
            working -= 1
        if first == 0:
            raise OSError("no")
        return 1

    with pytest.raises(OSError, match="no"):
        reader.read(torch.zeros(10**7), 0, 10**7, "float32", use)
    assert working == 0
    assert most == 4
    reader.close()


def test_what_is_not_finite_is_not_advised_to_be_published_all_the_same() -> None:
    """The service rejects it as well."""
    assert "check_finite" not in str(not_finite_here("w", 1))


@pytest.mark.parametrize(("count", "said"), [(1, "1 value that is"), (2, "2 values that are")])
def test_a_part_that_is_not_finite_is_counted_in_words_that_fit(count: int, said: str) -> None:
    assert f"tensor w holds {said} NaN or infinite in this rank's part: " in str(not_finite_here("w", count))
