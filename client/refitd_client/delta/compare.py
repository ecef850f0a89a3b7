# pyright: basic
"""What changed in tensors on a device since a base on the same device: a few launches, and one wait for the counts.

    count     how many elements changed in each row (`fingerprint/device.py`)
    sum up    where the changes of each row go; the totals come to the host, which makes room for them
    take      indices and values, close together and in order; what they add to fingerprints; which are not finite

Indices and values are gathered on the device in two buffers in turns, and sent to page-locked host memory on a stream
of their own, so that no computation waits for them. Page-locking takes 0.25 s a gigabyte; torch keeps such blocks when
they are freed, so from the second delta on it costs nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.delta.shadow import ChangedElements, ShadowDiff
from refitd_client.fingerprint import Bits
from refitd_client.fingerprint import device as fingerprint_device
from refitd_client.fingerprint.device import Rows, bits_at, on_device
from refitd_client.fingerprint.tensors import has_triton
from refitd_client.write import cuda

ROOM = 2**23
"""Bytes of a buffer on the device. It is made larger only for a single part with more changes."""

LONGEST = 2**20
"""Elements of a part: of 16 bits, its changes fit a buffer whatever changed."""

Counts = NDArray[np.int64]


class Comparison:
    """The comparison of some tensors, by number. It takes no more changes once more than `most` elements changed."""

    def __init__(
        self,
        device: Any,
        tensors: int,
        most: int,
        *,
        expected: int = 0,
        room: int | None = None,
    ) -> None:
        """Make the buffers for so many `tensors`. At most `most` changed elements are wanted, and there is room on the
        host for `expected` of them at once. A buffer on the device has `room` bytes.
        """
        self.count = 0
        self.out = SideStream(device)
        self._most = most
        self.kernels: Any = fingerprint_device
        if device.type == "cuda" and has_triton():
            from refitd_client.fingerprint import kernel

            self.kernels = kernel
        self._keys = self.kernels.column_keys(device)
        self._sums = torch.zeros((tensors, 2), dtype=torch.int64, device=device)
        arenas = (_Arena(expected, is_pinned=device.type == "cuda") for _ in range(2))
        self._indices, self._values = arenas
        self._size = ROOM if room is None else room
        self._buffers = [_Buffer(device), _Buffer(device)]
        self._pieces: list[_Piece] = []

    @property
    def is_too_much(self) -> bool:
        return self.count > self._most

    def run(self, tally: "Tally", begin: int, end: int, *, update: bool) -> Counts:
        """Compare the parts `begin` to `end` of a list, and bring the base up to date if `update`. Returns how many
        elements changed in each.
        """
        counts = tally.totals(begin, end, self.kernels)
        total = int(counts.sum())
        self.count += total
        if total == 0 or self.is_too_much:
            return counts
        listed = tally.rows.listed
        value = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[listed.width]
        types = (torch.int64 if listed.has_long_index else torch.int32), value
        self._indices.reserve(total, types[0])
        self._values.reserve(total, types[1])
        for low, high in _groups(counts, self._size // (types[0].itemsize + 2 * types[1].itemsize)):
            buffer = self._buffers[0]
            self._buffers.reverse()
            spaces = buffer.spaces(int(counts[low:high].sum()), types, self._size)
            rows = listed.begins[begin + low], listed.begins[begin + high]
            self.kernels.take(
                tally.rows, *rows, starts=tally.starts, keys=self._keys, sums=self._sums, rooms=spaces, update=update
            )
            self.out.follow()
            with self.out.current():
                slices = self._indices.fill(spaces[0]), self._values.fill(spaces[1])
                buffer.is_free = self.out.mark()
            self._pieces.append(_Piece(listed.numbers[begin + low : begin + high], counts[low:high], *slices))
        return counts

    def changes(self, names: Sequence[str]) -> ShadowDiff:
        """All changes, by the names of the tensors. Waits until they have arrived."""
        sums = self._sums.cpu().numpy()
        self.out.wait()

        def named(numbers: NDArray[Any]) -> dict[str, int]:
            """Those that are not 0, as Python's own numbers."""
            places = np.flatnonzero(numbers)
            return {names[at]: number for at, number in zip(places.tolist(), numbers[places].tolist(), strict=True)}

        return ShadowDiff(
            count=self.count,
            found={names[number]: found for number, found in _by_tensor(self._pieces)},
            shifts=named(sums[:, 0].view(np.uint64)),
            nonfinite=named(sums[:, 1]),
        )


class SideStream:
    """A stream beside the current one. Without a GPU everything happens at once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Have what is queued here from now on wait for what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def send(self, target: int, source: int, count: int) -> None:
        """Begin to copy `count` bytes from the address `source` on the device to `target` in host memory."""
        if self._stream is None:
            cuda.copy_here(target, source, count)
        elif cuda.has_driver():
            cuda.copy("down", target, source, count, self._stream)
        else:
            with self.current():
                there = bits_at(source, count, 1, self._device)
                bits_at(target, count, 1, torch.device("cpu")).copy_(there, non_blocking=True)

    def current(self) -> Any:
        """A context in which this is the current stream. It does not wait for any other."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """An event for other streams to wait for: the end of all that is queued here."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Tally:
    """Where the changes of each row of a list begin: 8 bytes a row on the device."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        self._begins = on_device(rows.listed.begins, rows.device)
        self._here = torch.empty(len(self._begins), dtype=torch.int64, pin_memory=rows.device.type == "cuda")

    def totals(self, begin: int, end: int, kernels: Any) -> Counts:
        """Count the changes of the parts `begin` to `end`; the parts before them have been counted. `kernels` is the
        module `fingerprint.kernel` or `fingerprint.device`.
        """
        low, high = self.rows.listed.begins[begin], self.rows.listed.begins[end]
        kernels.count(self.rows, low, high, self.starts[1:])  # each row's where the next one begins
        self.starts[low : high + 1].cumsum_(0)
        here = self._here[begin : end + 1]
        kernels.report(self.starts, self._begins[begin : end + 1], here)
        if self.starts.is_cuda:
            torch.cuda.current_stream(self.starts.device).synchronize()
        return np.diff(here.numpy())


class _Buffer:
    """Memory of the device for the changes of some parts, until they are sent. `is_free` is the event of that."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.is_free: Any = None

    def spaces(self, count: int, types: tuple[Any, Any], size: int) -> list[Any]:
        """Space for `count` changes along the current stream: for indices, values, and the values before. `types` are
        those of indices and of values; the buffer has `size` bytes, unless the changes take more.
        """
        if self.is_free is not None:  # the side stream is sending what is in it
            torch.cuda.current_stream(self._device).wait_event(self.is_free)
        kinds = types[0], types[1], types[1]
        ends = np.cumsum([-(-count * kind.itemsize // 16) * 16 for kind in kinds]).tolist()  # aligned for any type
        if ends[-1] > len(self._memory):
            self._memory = torch.empty(max(ends[-1], size), dtype=torch.uint8, device=self._device)
        return [
            self._memory[begin : begin + count * kind.itemsize].view(kind)
            for begin, kind in zip([0, *ends], kinds, strict=False)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    block: Any
    begin: int
    end: int

    def leads_to(self, other: "_Slice") -> bool:
        return self.block is other.block and self.end == other.begin

    def array_to(self, last: "_Slice") -> Bits:
        """This slice and all up to `last`, as unsigned integers. The array keeps the block alive."""
        array = self.block[self.begin : last.end].numpy()
        return array.view(f"u{array.itemsize}")


class _Arena:
    """Blocks of host memory, one for each type, filled from the front. A block holds at least `least` numbers."""

    def __init__(self, least: int, *, is_pinned: bool) -> None:
        self._least = least
        self._is_pinned = is_pinned
        self._blocks: dict[Any, tuple[Any, int]] = {}

    def reserve(self, count: int, kind: Any) -> None:
        block, used = self._blocks.get(kind, (None, 0))
        if block is None or used + count > len(block):
            size = max(count, self._least)
            self._blocks[kind] = torch.empty(size, dtype=kind, pin_memory=self._is_pinned), 0

    def fill(self, source: Any) -> _Slice:
        """Send a device's numbers to their reserved room, along the current stream."""
        block, used = self._blocks[source.dtype]
        end = used + source.numel()
        block[used:end].copy_(source, non_blocking=True)
        self._blocks[source.dtype] = block, end
        return _Slice(block, used, end)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The changes of some parts that follow each other: the parts' tensors, and how many changed in each."""

    numbers: NDArray[np.int64]
    counts: Counts
    indices: _Slice
    values: _Slice


def _by_tensor(pieces: Sequence[_Piece]) -> Iterator[tuple[int, ChangedElements]]:
    """Each tensor's changes: in place where they lie in one piece, else put together."""
    runs: list[list[_Piece]] = []  # pieces that lie one behind the other
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and last.indices.leads_to(piece.indices) and last.values.leads_to(piece.values):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    found: dict[int, list[tuple[Bits, ...]]] = {}
    for run in runs:
        numbers, counts = (np.concatenate(each) for each in zip(*((x.numbers, x.counts) for x in run), strict=True))
        indices = run[0].indices.array_to(run[-1].indices)
        values = run[0].values.array_to(run[-1].values)
        numbers, ends = numbers[counts > 0], np.cumsum(counts[counts > 0])
        is_last = np.append(numbers[1:] != numbers[:-1], True)
        places = [0, *ends[is_last].tolist()]
        for number, (begin, end) in zip(numbers[is_last].tolist(), pairwise(places), strict=True):
            found.setdefault(number, []).append((indices[begin:end], values[begin:end]))
    for number, parts in found.items():
        joined = [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        yield number, ChangedElements(indices=joined[0], values=joined[1])


def _groups(counts: Counts, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of parts with at most `most` changes together, or of one part. Parts without changes are left out."""
    ends = np.cumsum(counts)
    begin, before = 0, 0
    while before < ends[-1]:
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        if ends[end - 1] > before:
            yield begin, end
        begin, before = end, ends[end - 1]
