"""Changed elements into tensors on a GPU: one launch for four million of them, whatever tensors they belong to.

Indices and values wait in pinned host memory and go over the bus in chunks, since all of them at once would take too
much of a GPU that an engine has filled. Each program of a kernel has up to 1024 elements of one piece; a table says
which, and where the piece's route leads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.fingerprint.definition import MASK
from refitd_sglang.adjacent import together
from refitd_sglang.patch import Piece, Shifts

BLOCK = 1024  # elements of one program
COLUMNS = 10  # of the table
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNED = 512
_SCRATCH = 24 * 2**20  # bytes on the device: indices, new and old values of a chunk


def units(pieces: Sequence[Piece], numbers: Sequence[int], addresses: Sequence[int]) -> NDArray[np.int64]:
    """The table of pieces whose elements follow each other in one array, in blocks.

    A row: first element, elements, address of the model's tensor, the route's offset, begin, row_index, row_place and
    column_place, the piece's number and its holder's.
    """
    found: list[NDArray[np.int64]] = []
    first = 0
    for piece, number in zip(pieces, numbers, strict=True):
        count, route = len(piece.indices), piece.route
        begins = np.arange(0, count, BLOCK, dtype=np.int64)
        unit = np.empty((len(begins), COLUMNS), np.int64)
        unit[:] = (
            0, 0, addresses[route.holder], route.offset, route.begin,
            route.row_index, route.row_place, route.column_place, number, route.holder,
        )  # fmt: skip
        unit[:, 0] = first + begins
        unit[:, 1] = np.minimum(BLOCK, count - begins)
        found.append(unit)
        first += count
    return np.concatenate(found) if found else np.empty((0, COLUMNS), np.int64)


class DevicePatch:
    """Tensors on one GPU, by kernels. Made and looked at in any thread."""

    def __init__(self, pieces: Sequence[Piece], holders: Sequence[Any]) -> None:
        """As `HostPatch`."""
        self._device = holders[pieces[0].route.holder].device
        self._pieces, self._holders = len(pieces), len(holders)
        addresses = [tensor.data_ptr() for tensor in holders]
        groups: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(pieces):
            groups.setdefault((piece.values.itemsize, piece.indices.itemsize), []).append(number)
        with torch.cuda.device(self._device):  # a thread begins on the first GPU, which may be another rank's
            self._groups = [
                _Group([pieces[number] for number in numbers], numbers, addresses, self._device)
                for numbers in groups.values()
            ]

    def look(self) -> Shifts:
        """As `Patch`. On a stream of its own: an engine may be computing meanwhile, and does not write."""
        with torch.cuda.device(self._device), torch.cuda.stream(_side(self._device)):
            sums = torch.zeros(self._pieces + self._holders, dtype=torch.int64, device=self._device)
            for group in self._groups:
                group.look(sums, self._pieces)
            found = [int(number) & MASK for number in sums.cpu().numpy().view(np.uint64)]
            torch.cuda.current_stream().synchronize()
        return Shifts(found[: self._pieces], found[self._pieces :])

    def write(self) -> None:
        """As `Patch`."""
        self._put(old=False)

    def undo(self) -> None:
        """As `Patch`."""
        self._put(old=True)

    def _put(self, *, old: bool) -> None:
        with torch.cuda.device(self._device):
            for group in self._groups:
                group.put(old=old)
            torch.cuda.current_stream().synchronize()


def pinned_room(size: int) -> NDArray[np.uint8]:
    """Memory that a delta's file is read to, and that goes over the bus from there."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Programs `units`, which have the elements `begin` to `end`."""

    units: slice
    begin: int
    end: int


class _Group:
    """Pieces with elements of one width, and indices of one."""

    def __init__(self, pieces: Sequence[Piece], numbers: Sequence[int], addresses: Sequence[int], device: Any) -> None:
        self._device = device
        self._width = pieces[0].values.itemsize
        self._indices = _pinned([piece.indices for piece in pieces])
        self._values = _pinned([piece.values for piece in pieces])
        self._olds = torch.empty_like(self._values, pin_memory=self._values.is_pinned())
        _warm(device, self._width, self._indices.element_size())
        table = units(pieces, numbers, addresses)
        self._table = torch.from_numpy(table).to(device)
        self._chunks = _chunks(table, self._indices.element_size() + 2 * self._width)

    def look(self, sums: Any, holders: int) -> None:
        """Keep what is there, and add what changes to `sums`: a piece's by its number, a holder's from `holders` on."""
        from refitd_sglang import patch_kernel

        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, olds = self._rooms(memory, chunk)
                _bring(indices, self._indices, chunk)
                _bring(values, self._values, chunk)
                table = self._table[chunk.units]
                patch_kernel.look(table, chunk.begin, indices, values, olds, sums, holders, self._width)
                self._olds[chunk.begin : chunk.end].copy_(olds, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def put(self, *, old: bool) -> None:
        """Write the new values, or those that were there."""
        from refitd_sglang import patch_kernel

        source = self._olds if old else self._values
        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, _ = self._rooms(memory, chunk)
                _bring(indices, self._indices, chunk)
                _bring(values, source, chunk)
                patch_kernel.put(self._table[chunk.units], chunk.begin, indices, values, self._width)
            torch.cuda.current_stream().synchronize()

    def _rooms(self, memory: Any, chunk: _Chunk) -> list[Any]:
        """Room on the device for indices, new and old values of a chunk."""
        found, end = list[Any](), 0
        for like in (self._indices, self._values, self._values):
            size = (chunk.end - chunk.begin) * like.element_size()
            found.append(memory[end : end + size].view(like.dtype))
            end += -(-size // _ALIGNED) * _ALIGNED
        return found


def _bring(room: Any, host: Any, chunk: _Chunk) -> None:
    room.copy_(host[chunk.begin : chunk.end], non_blocking=True)


_turn = Lock()


@contextmanager
def _scratch(device: Any) -> Iterator[Any]:
    """The piece of a GPU's memory that all chunks go through, one patch at a time. Leave it when all has arrived."""
    with _turn:
        yield _memory(device)


@cache
def _side(device: Any) -> Any:
    """One stream for all: each has memory of its own."""
    return torch.cuda.Stream(device)


@cache
def _memory(device: Any) -> Any:
    return torch.empty(_SCRATCH, dtype=torch.uint8, device=device)


@cache
def _warm(device: Any, width: int, index_width: int) -> None:
    """Have the kernel that writes compiled before the first pause in which it is needed: with nothing to do."""
    from refitd_sglang import patch_kernel

    table = torch.zeros(1, COLUMNS, dtype=torch.int64, device=device)
    table[0, 5] = 1  # row_index is divided by
    indices, values = (torch.zeros(1, dtype=_INTEGERS[size], device=device) for size in (index_width, width))
    patch_kernel.put(table, 0, indices, values, width)


def _is_pinned(array: NDArray[Any]) -> bool:
    return torch.from_numpy(array[:1].view(np.uint8)).is_pinned()


def _chunks(table: NDArray[np.int64], nbytes: int) -> list[_Chunk]:
    """As many programs at a time as have room: `nbytes` is what an element takes."""
    step = max(1, (_SCRATCH - 3 * _ALIGNED) // (nbytes * BLOCK))
    ends = table[:, 0] + table[:, 1]
    return [
        _Chunk(slice(at, at + step), int(table[at, 0]), int(ends[min(at + step, len(table)) - 1]))
        for at in range(0, len(table), step)
    ]


def _pinned(arrays: Sequence[NDArray[Any]]) -> Any:
    """One array after the other, as signed integers in memory that a GPU reads without a detour."""
    kind = arrays[0].dtype
    if (there := together(arrays)) is not None and _is_pinned(there):
        return torch.from_numpy(there.view(f"i{kind.itemsize}"))
    joined = torch.empty(
        sum(len(array) for array in arrays),
        dtype=_INTEGERS[kind.itemsize],
        pin_memory=torch.cuda.is_available(),
    )
    if len(joined):
        np.concatenate(arrays, out=joined.numpy().view(kind))
    return joined
