"""A rank's tensors are read in pieces by several threads, all of which have ended when reading has."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from refitd_client.sharded.follower import PIECE_BYTES, Reader
from refitd_client.transport.schedule import Strip, strip


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """One with several threads, however many processors there are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    return Reader(ranks=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (1000, 10), (5_000_000, 5_000_000), (1_500_000, 500)])
def test_every_element_comes_once_cast_and_with_its_place(reader: Reader, dtype: str, count: int, width: int) -> None:
    """In one row, and in rows with gaps."""
    flat = torch.arange(count, dtype=torch.float32)
    kind = getattr(torch, dtype)
    expected = flat.to(kind).view(torch.uint8).numpy()
    size, rows = width * kind.itemsize, count // width
    whole = np.zeros((rows, 2 * size), np.uint8)

    def use(piece: Strip, data: NDArray[np.uint8]) -> int:
        assert len(data) <= PIECE_BYTES
        place = whole.reshape(-1)[piece.begin :]
        for row in range(piece.rows):
            place[row * piece.pitch :][: piece.width] += data[row * piece.width :][: piece.width]
        return len(data)

    assert reader.read(flat, [strip(0, size, rows, 2 * size)], dtype, use) == len(expected)
    assert np.array_equal(whole[:, :size].reshape(-1), expected)
    reader.close()


def test_an_error_in_one_thread_ends_the_others_before_it_is_raised(reader: Reader) -> None:
    """They write to files that the caller closes then."""
    working, most = 0, 0
    turn, together = threading.Lock(), threading.Barrier(4, timeout=30)

    def use(piece: Strip, _: NDArray[np.uint8]) -> int:
        nonlocal working, most
        with turn:
            working += 1
            most = max(most, working)
        if piece.begin % 2**22 == 0 and piece.begin < 2**24:
            together.wait()
        with turn:
            working -= 1
        if piece.begin == 0:
            raise OSError("no")
        return 1

    with pytest.raises(OSError, match="no"):
        reader.read(torch.zeros(10**7), [strip(0, 4 * 10**7)], "float32", use)
    assert working == 0
    assert most == 4
