"""Which moves are made by one launch within a GPU's memory, and how they are shared out."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from refitd_plugin.memory import copy_schedule
from refitd_plugin.memory.copy_schedule import WORD, MoveTable, is_plain, stretches_of
from refitd_plugin.memory.spans import MemoryMove
from support.host_gpu import HOST, HostGpu

LONG = 2**19  # bytes of a stretch
SIZES = [16, LONG, LONG + 16, 3 * LONG - 16, 32]


def memory(count: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes that begin at a multiple of 16."""
    data = np.random.default_rng(seed).integers(0, 256, count + 16, dtype=np.uint8)
    return data[-data.ctypes.data % 16 :][:count]


def test_stretches_copy_every_byte_of_the_moves_and_no_other() -> None:
    source, target = memory(14 * LONG, 1), memory(7 * LONG, 2)
    wanted, moves, at = target.copy(), list[MemoryMove](), 0
    for size in SIZES:
        moves.append(MemoryMove(target.ctypes.data + at, source.ctypes.data + 2 * at, size))
        wanted[at : at + size] = source[2 * at : 2 * at + size]
        at += size + 48
    assert all(map(is_plain, moves))
    table = stretches_of(moves)
    assert len(table) == 1 + 1 + 2 + 3 + 1
    for to, begin, words in table.tolist():
        assert 0 < words * WORD <= LONG
        ctypes.memmove(to, begin, words * WORD)
    assert np.array_equal(target, wanted)


@pytest.mark.parametrize(
    "move", [MemoryMove(8, 0, 16), MemoryMove(0, 8, 16), MemoryMove(0, 0, 24), MemoryMove(0, 0, 16, 2, 32, 16)]
)
def test_what_is_not_made_of_whole_words_or_lies_in_rows_is_left_to_the_driver(move: MemoryMove) -> None:
    assert not is_plain(move)


@pytest.mark.parametrize("near", [True, False])
def test_moves_of_one_gpu_are_one_launch_and_those_from_another_one_are_the_driver_s(
    near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows that are apart are the driver's in either case."""
    HostGpu(monkeypatch)
    monkeypatch.setattr(copy_schedule.driver, "device_of", lambda _: 0 if near else 1)
    source, target = memory(4096, 3), np.zeros(4096, np.uint8)
    base, wanted = target.ctypes.data + -target.ctypes.data % 16, np.zeros(4096 - 16, np.uint8)
    moves = [MemoryMove(base, 64, 32), MemoryMove(base + 100, 200, 3), MemoryMove(base + 512, 1024, 16, 4, 32, 64)]
    wanted[0:32], wanted[100:103] = source[64:96], source[200:203]
    for row in range(4):
        wanted[512 + 32 * row : 528 + 32 * row] = source[1024 + 64 * row : 1040 + 64 * row]
    table = MoveTable({}, {"memory": moves}, [])
    files = {"memory": SimpleNamespace(address=source.ctypes.data)}
    ready = copy_schedule.between_devices(table, files, HOST, no_tensors)
    assert len(ready.steps) == 3
    assert sum(type(getattr(step, "__self__", None)).__name__ == "_HostMoves" for step in ready.steps) == near
    for step in ready.steps:
        step()
    offset = -target.ctypes.data % 16
    assert np.array_equal(target[offset : offset + len(wanted)], wanted)


def no_tensors() -> dict[str, Any]:
    """All is moved."""
    return dict[str, torch.Tensor]()
