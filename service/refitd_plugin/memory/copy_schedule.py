"""How the copies of a replay reach the device: what is to be done in the pause, made ready before it.

    in host memory      the copies of the plan as they are
    registered files,
    memory of GPUs      one order to the driver for each move, along the current stream
    other files         through two pinned buffers, one being filled by all cores while the other is copied

To make ready is a matter of numbers alone. A thread that calls torch beside SGLang's loop waits for the interpreter at
each call, and some thousand calls would take seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from refitd_client.lanes import in_lanes, lanes_for
from refitd_plugin.memory.spans import MemoryMove, joined, move_of
from refitd_plugin.proof.contents import Overlap
from refitd_plugin.update.recorder import PlanCopy

_BUFFER_BYTES = 32 * 2**20  # bytes of a pinned buffer
_THREAD_SHARE = 2**21  # bytes that are worth a thread

Step = Callable[[], object]
Order = Callable[[MemoryMove, int, int], None]


@dataclass(frozen=True, slots=True)
class CopyWatch:
    """What is fingerprinted beside the copies: the model's tensors by name, and further ones after them."""

    overlap: Overlap
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """Steps that begin copies, in this order, where `device` is the current one. `keeps` is what must live as long as
    they do. With `watch` what is copied is fingerprinted meanwhile.
    """

    steps: Sequence[Step]
    keeps: object = None
    watch: CopyWatch | None = None
    device: torch.device | None = None

    def on_device(self) -> AbstractContextManager[None]:
        """The device on which the steps are to run: a thread begins on the first GPU."""
        return nullcontext() if self.device is None else torch.cuda.device(self.device)


@dataclass(frozen=True, slots=True)
class MoveTable:
    """A plan's copies for files of one layout: moves by file, their sources counted from its begin; and the others."""

    headers: Mapping[str, Any]
    moves: Mapping[str, Sequence[MemoryMove]]
    rest: Sequence[PlanCopy]


def table_of(copies: Iterable[PlanCopy], headers: Mapping[str, Any]) -> MoveTable:
    """Where the plan's copies have their sources in files with these headers. What is in none of them is no move."""
    places = {
        name: (file, header.data_start + spec.start)
        for file, header in headers.items()
        for name, spec in header.tensors.items()
    }
    moves: dict[str, list[MemoryMove]] = {file: [] for file in headers}
    rest: list[PlanCopy] = []
    for copy in copies:
        file, begin = places.get(copy.name, ("", 0))
        move = move_of(copy.target, copy.strides, begin + copy.offset * copy.target.element_size())
        if move is None or copy.name not in places:
            rest.append(copy)
        else:
            moves[file].append(move)
    return MoveTable(headers, {file: joined(some) for file, some in moves.items()}, rest)


def within_host(copies: Iterable[PlanCopy], tensors: Callable[[], Mapping[str, torch.Tensor]]) -> CopySchedule:
    """Copies within host memory. What `tensors` gives is looked up when each is made: it may change until then."""
    return CopySchedule(_copies(copies, tensors))


def by_address(
    order: Order,
    table: MoveTable,
    files: Mapping[str, Any],
    device: torch.device,
    tensors: Callable[[], Mapping[str, Any]],
    watch: CopyWatch | None = None,
) -> CopySchedule:
    """Copies to a device from memory that the driver knows: registered files, or allocations of GPUs. `order`: the
    driver's call for one move. `files`: where the files of the table begin, by name. `tensors`: gives the tensors from
    memory that stays, for copies that are no moves.
    """
    index = device.index or 0

    def begin(move: MemoryMove, above: int) -> None:
        order(move, above, _stream_of(index))

    steps: list[Step] = [
        partial(begin, move, files[file].address) for file, moves in table.moves.items() for move in moves
    ]
    return CopySchedule(steps + _copies(table.rest, tensors), files, watch, device)


def _copies(rest: Iterable[PlanCopy], tensors: Callable[[], Mapping[str, Any]]) -> list[Step]:
    tensors = cache(tensors)

    def copy(each: PlanCopy) -> None:
        each.target.copy_(each.source(tensors()), non_blocking=True)

    return [partial(copy, each) for each in rest]


def _stream_of(device: int) -> int:
    """The current stream of a GPU, as Triton asks for it: `torch.cuda.current_stream` takes several µs, for each of
    hundreds of copies, in the pause.
    """
    return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001


def buffered(copies: Iterable[PlanCopy], tensors: Callable[[], Mapping[str, torch.Tensor]]) -> CopySchedule:
    """Copies to a device from memory that the driver does not know."""

    def carry() -> None:
        found = tensors()
        buffers: Any = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        events: list[Any] = [None, None]
        for target, source in (part for copy in copies for part in _parts(copy.target, copy.source(found))):
            if source.nbytes > _BUFFER_BYTES:  # one row that is larger than a buffer
                target.copy_(source)
                continue
            buffers.reverse()
            events.reverse()
            if events[0] is not None:  # the copy from this buffer may still be under way
                events[0].synchronize()
            there = buffers[0][: source.nbytes].view(source.dtype).view(source.shape)
            _fill(there, source)
            target.copy_(there, non_blocking=True)
            events[0] = torch.cuda.current_stream(target.device).record_event()

    return CopySchedule([carry])


def _parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, _BUFFER_BYTES // max(1, source[:1].nbytes)) if source.dim() else 1
    if source.dim() == 0 or source.shape[0] <= rows:
        yield target, source
        return
    for at in range(0, source.shape[0], rows):
        yield target[at : at + rows], source[at : at + rows]


def _fill(there: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within host memory, on as many cores as that is worth."""
    lanes = min(lanes_for(64), max(1, source.nbytes // _THREAD_SHARE), source.shape[0] if source.dim() else 1)
    if lanes == 1:
        there.copy_(source)
        return
    parts = zip(there.tensor_split(lanes), source.tensor_split(lanes), strict=True)
    in_lanes([partial(_copy_part, one, other) for one, other in parts], lanes=lanes)


def _copy_part(there: torch.Tensor, source: torch.Tensor, _lane: object) -> None:
    there.copy_(source)
