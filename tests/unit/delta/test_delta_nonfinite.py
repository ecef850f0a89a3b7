"""New values that are NaN or infinite are found wherever they are in a delta, and named by their tensor."""

import numpy as np
import pytest

from refitd_client.delta.change import Change, nonfinite_in

_NAN, _COUNT = 0x7FC0, 2**20 + 5


def change(values: "np.ndarray[tuple[int], np.dtype[np.uint16]]") -> Change:
    indices = np.arange(len(values), dtype=np.uint32)
    return Change(dtype="BF16", shape=(len(values),), indices=indices, values=values, base=0, result=0)


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, _COUNT - 1])
def test_one_value_in_a_million_is_found_in_whichever_piece_it_lies(at: int) -> None:
    data = np.zeros(2 * _COUNT, np.uint16)
    changes = {"a": change(data[:_COUNT]), "b": change(data[_COUNT:])}  # they follow each other, as in a file
    assert nonfinite_in(changes) == {}
    data[_COUNT + at] = _NAN
    assert nonfinite_in(changes) == {"b": 1}


def test_values_of_no_change_at_all_are_finite() -> None:
    assert nonfinite_in({}) == {}
    assert nonfinite_in({"a": change(np.zeros(0, np.uint16))}) == {}
