"""Stretches of memory, held against bytes counted one by one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_plugin.memory import driver
from refitd_plugin.memory.copy_schedule import MoveTable, by_address
from refitd_plugin.memory.spans import Covered, MemoryMove, NamedSpans, TooManyStretchesError, stretches
from support.host_gpu import HOST, HostGpu

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))
SPANS = st.lists(SPAN, max_size=8)


def counted(spans: list[tuple[int, int]]) -> set[int]:
    return {byte for begin, end in spans for byte in range(begin, end)}


@given(SPANS, SPANS, SPAN)
def test_covered_bytes_are_those_that_one_counts(
    some: list[tuple[int, int]], others: list[tuple[int, int]], one: tuple[int, int]
) -> None:
    assert Covered(some).without(Covered(others)) == len(counted(some) - counted(others))
    assert Covered(some).touches(*one) == bool(counted(some) & counted([one]))


@given(st.lists(st.integers(1, 4), max_size=4), st.permutations(range(4)), st.integers(1, 2))
def test_a_strided_tensor_is_where_its_elements_are(shape: list[int], order: list[int], gap: int) -> None:
    strides, step = [0] * len(shape), gap
    for dimension in [each for each in order if each < len(shape)]:
        strides[dimension] = step
        step *= shape[dimension]
    elements = {0}
    for size, stride in zip(shape, strides, strict=True):
        elements = {at + index * stride for at in elements for index in range(size)}
    found = counted(list(stretches(100, 2, shape, strides)))
    assert found == {100 + 2 * element + byte for element in elements for byte in range(2)}


def test_an_empty_tensor_is_nowhere() -> None:
    assert list(stretches(100, 2, (3, 0), (0, 1))) == []


def test_a_tensor_in_too_many_pieces_is_refused_before_they_are_made() -> None:
    with pytest.raises(TooManyStretchesError):
        list(stretches(0, 2, (3_000_000, 2), (4, 2)))


def test_an_address_is_found_in_its_stretch_alone() -> None:
    named = NamedSpans([(10, 20, "a"), (30, 40, "b"), (25, 25, "nothing")])
    assert named.at(10) == ("a", 10)
    assert named.at(39) == ("b", 30)
    assert [named.at(address) for address in (9, 20, 25, 40)] == [None] * 4


@pytest.mark.parametrize("order", [driver.to_device, driver.between_devices])
def test_each_move_is_one_order_to_the_driver_wherever_it_comes_from(
    order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are apart as well."""
    HostGpu(monkeypatch)
    source = np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)
    target, wanted = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    base = target.ctypes.data
    moves = [MemoryMove(base, 64, 32), MemoryMove(base + 100, 200, 3), MemoryMove(base + 512, 1024, 16, 4, 32, 64)]
    wanted[0:32], wanted[100:103] = source[64:96], source[200:203]
    for row in range(4):
        wanted[512 + 32 * row : 528 + 32 * row] = source[1024 + 64 * row : 1040 + 64 * row]
    files = {"memory": SimpleNamespace(address=source.ctypes.data)}
    ready = by_address(order, MoveTable({}, {"memory": moves}, []), files, HOST, dict)
    assert len(ready.steps) == len(moves)
    for step in ready.steps:
        step()
    assert np.array_equal(target, wanted)
