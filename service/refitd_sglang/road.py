"""How the copies of a replay reach the device: what is to be done in the pause, made ready before it.

in host memory      the copies of the plan as they are
registered files    one order to the driver for each move, along the current stream
other files         through two pinned buffers, one being filled by all cores while the other is copied
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from refitd_client.lanes import in_lanes, lanes_for
from refitd_sglang import driver
from refitd_sglang.moves import Move, joined, move_of

_ROOM = 32 * 2**20  # bytes of a pinned buffer
_SHARE = 2**21  # bytes that are worth a thread

Step = Callable[[], object]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Road:
    """Steps that begin copies, in this order. `keeps` is what must live as long as they do."""

    steps: Sequence[Step]
    keeps: object = None


def plain(pairs: Sequence[Pair]) -> Road:
    """Copies between tensors in host memory."""
    return Road([partial(target.copy_, source, non_blocking=True) for target, source in pairs])


def registered(pairs: Sequence[Pair], others: Sequence[Pair], files: Mapping[str, object]) -> Road:
    """Copies from registered `files`. `others` are the same from memory that stays: for what is no single move."""
    moves: list[Move] = []
    rest: list[Pair] = []
    for pair, other in zip(pairs, others, strict=True):
        move = move_of(*pair)
        moves.append(move) if move is not None else rest.append(other)
    along = _Along(pairs[0][0].device if pairs else None)
    return Road([*(partial(along.begin, move) for move in joined(moves)), *plain(rest).steps], files)


def buffered(pairs: Sequence[Pair]) -> Road:
    """Copies to a device from memory that the driver does not know."""
    rooms = _Rooms()
    return Road([partial(rooms.carry, target, source) for target, source in pairs], rooms)


class _Along:
    """Orders to the driver along the stream that is current when they are given."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def begin(self, move: Move) -> None:
        with torch.cuda.device(self._device):
            driver.to_device(move, torch.cuda.current_stream().cuda_stream)


class _Rooms:
    """Two pinned buffers, made when they are first needed."""

    def __init__(self) -> None:
        self._rooms: list[Any] = []
        self._events: list[Any] = [None, None]
        self._used = 0

    def carry(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor, in parts that fit."""
        rows = max(1, _ROOM // max(1, source[:1].nbytes)) if source.dim() else 1
        if source.dim() == 0 or source.shape[0] <= rows:
            self._part(target, source)
            return
        for at in range(0, source.shape[0], rows):
            self._part(target[at : at + rows], source[at : at + rows])

    def _part(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.nbytes > _ROOM:  # one row that is larger than a buffer
            target.copy_(source)
            return
        room = self._room(source.nbytes)
        there = room.view(source.dtype).view(source.shape)
        _fill(there, source)
        target.copy_(there, non_blocking=True)
        self._events[0] = torch.cuda.current_stream(target.device).record_event()

    def _room(self, nbytes: int) -> torch.Tensor:
        """Some of a buffer, the other one if this one is full."""
        if not self._rooms:
            self._rooms = [torch.empty(_ROOM, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        begin = -(-self._used // 16) * 16
        if begin + nbytes > _ROOM:
            self._rooms.reverse()
            self._events.reverse()
            if self._events[0] is not None:
                self._events[0].synchronize()
            begin = 0
        self._used = begin + nbytes
        return self._rooms[0][begin : begin + nbytes]


def _fill(there: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within host memory, on as many cores as that is worth."""
    lanes = min(lanes_for(64), max(1, source.nbytes // _SHARE), source.shape[0] if source.dim() else 1)
    if lanes == 1:
        there.copy_(source)
        return
    parts = zip(there.tensor_split(lanes), source.tensor_split(lanes), strict=True)
    in_lanes([_copying(one, other) for one, other in parts], lanes=lanes)


def _copying(there: torch.Tensor, source: torch.Tensor) -> Callable[[Any], None]:
    def job(_: Any) -> None:
        there.copy_(source)

    return job
