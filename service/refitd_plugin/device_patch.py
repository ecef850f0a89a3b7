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

from refitd_client.fingerprint.host import MASK
from refitd_plugin.layout import ADDRESS, COLUMNS, COUNT, FIRST, HOLDER, ROW_INDEX, LaidOutDelta, PieceGroup, blocks
from refitd_plugin.patch import Shifts

BLOCK = 1024  # elements of one program
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PATCH_ALIGNED = 512
_SCRATCH = 24 * 2**20  # bytes on the device: indices, new and old values of a chunk


class DevicePatch:
    """Tensors on one GPU, by kernels. Made and looked at in any thread."""

    def __init__(self, laid: LaidOutDelta, holders: Sequence[Any]) -> None:
        """As `HostPatch`. There is something to change."""
        self._device = holders[int(laid.groups[0].table[0, HOLDER])].device
        self._pieces, self._holders = len(laid.names), len(holders)
        addresses = np.array([tensor.data_ptr() for tensor in holders], np.int64)
        with torch.cuda.device(self._device):  # a thread begins on the first GPU, which may be another rank's
            self._groups = [_Group(group, addresses, self._device) for group in laid.groups]

    def look(self) -> Shifts:
        """As `Patch`. On a stream of its own: an engine may be computing meanwhile, and does not write."""
        with torch.cuda.device(self._device), torch.cuda.stream(_side_stream(self._device)):
            sums = torch.zeros(self._pieces + self._holders, dtype=torch.int64, device=self._device)
            for group in self._groups:
                group.look(sums, self._pieces)
            found = [int(number) & MASK for number in sums.cpu().numpy().view(np.uint64)]
            torch.cuda.current_stream().synchronize()
        return Shifts(found[: self._pieces], found[self._pieces :])

    def write(self) -> None:
        self._put(old=False)

    def undo(self) -> None:
        self._put(old=True)

    def _put(self, *, old: bool) -> None:
        with torch.cuda.device(self._device):
            for group in self._groups:
                group.put(old=old)
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Programs `units`, which have the elements `begin` to `end`."""

    units: slice
    begin: int
    end: int


class _Group:
    """Pieces with elements of one width, and indices of one."""

    def __init__(self, group: PieceGroup, addresses: NDArray[np.int64], device: Any) -> None:
        self._device = device
        self._width = group.values.itemsize
        self._indices, self._values = _pinned(group.indices), _pinned(group.values)
        self._olds = torch.empty_like(self._values, pin_memory=self._values.is_pinned())
        _warm(device, self._width, self._indices.element_size())
        table = blocks(group.table, BLOCK)
        table[:, ADDRESS] = addresses[table[:, HOLDER]]
        self._table = torch.from_numpy(table).to(device)
        self._chunks = _chunks(table, self._indices.element_size() + 2 * self._width)

    def look(self, sums: Any, holders: int) -> None:
        """Keep what is there, and add what changes to `sums`: a piece's by its number, a holder's from `holders` on."""
        from refitd_plugin import patch_kernel

        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, olds = self._device_buffers(memory, chunk)
                _copy_chunk(indices, self._indices, chunk)
                _copy_chunk(values, self._values, chunk)
                table = self._table[chunk.units]
                patch_kernel.look(table, chunk.begin, indices, values, olds, sums, holders, self._width)
                self._olds[chunk.begin : chunk.end].copy_(olds, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def put(self, *, old: bool) -> None:
        """Write the new values, or those that were there."""
        from refitd_plugin import patch_kernel

        source = self._olds if old else self._values
        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, _ = self._device_buffers(memory, chunk)
                _copy_chunk(indices, self._indices, chunk)
                _copy_chunk(values, source, chunk)
                patch_kernel.put(self._table[chunk.units], chunk.begin, indices, values, self._width)
            torch.cuda.current_stream().synchronize()

    def _device_buffers(self, memory: Any, chunk: _Chunk) -> list[Any]:
        """Memory on the device for indices, new and old values of a chunk."""
        found, end = list[Any](), 0
        for like in (self._indices, self._values, self._values):
            size = (chunk.end - chunk.begin) * like.element_size()
            found.append(memory[end : end + size].view(like.dtype))
            end += -(-size // _PATCH_ALIGNED) * _PATCH_ALIGNED
        return found


def _copy_chunk(target: Any, host: Any, chunk: _Chunk) -> None:
    target.copy_(host[chunk.begin : chunk.end], non_blocking=True)


_turn = Lock()


@contextmanager
def _scratch(device: Any) -> Iterator[Any]:
    """The piece of a GPU's memory that all chunks go through, one patch at a time. Leave it when copies are done."""
    with _turn:
        yield _memory(device)


@cache
def _side_stream(device: Any) -> Any:
    """One stream for all: each has memory of its own."""
    return torch.cuda.Stream(device)


@cache
def _memory(device: Any) -> Any:
    return torch.empty(_SCRATCH, dtype=torch.uint8, device=device)


@cache
def _warm(device: Any, width: int, index_width: int) -> None:
    """Have the kernel that writes compiled before the first pause in which it is needed: with nothing to do."""
    from refitd_plugin import patch_kernel

    table = torch.zeros(1, COLUMNS, dtype=torch.int64, device=device)
    table[0, ROW_INDEX] = 1  # row_index is divided by
    indices, values = (torch.zeros(1, dtype=_INTEGERS[size], device=device) for size in (index_width, width))
    patch_kernel.put(table, 0, indices, values, width)


def _chunks(table: NDArray[np.int64], nbytes: int) -> list[_Chunk]:
    """As many programs at a time as fit into the scratch memory: `nbytes` is what an element takes."""
    step = max(1, (_SCRATCH - 3 * _PATCH_ALIGNED) // (nbytes * BLOCK))
    ends = table[:, FIRST] + table[:, COUNT]
    return [
        _Chunk(slice(at, at + step), int(table[at, FIRST]), int(ends[min(at + step, len(table)) - 1]))
        for at in range(0, len(table), step)
    ]


def _pinned(array: NDArray[Any]) -> Any:
    """The array as signed integers in page-locked memory."""
    signed = array.view(f"i{array.itemsize}")
    if torch.from_numpy(array[:1].view(np.uint8)).is_pinned():
        return torch.from_numpy(signed)
    copy = torch.empty(len(array), dtype=_INTEGERS[array.itemsize], pin_memory=torch.cuda.is_available())
    copy.numpy()[:] = signed
    return copy
