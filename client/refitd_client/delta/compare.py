# pyright: basic
"""What changed in tensors on a device since a base that is there as well: a few launches, and one wait for the counts.

    count     how many elements changed in each row (`fingerprint/rows.py`)
    sum up    where the changes of each row go; the totals come to the host, which makes room for them
    take      indices and values, close together and in order; what they add to fingerprints; which are not finite

Indices and values are gathered on the device in two rooms in turns, and sent to page-locked host memory on a stream of
their own, so that nothing that is computed waits behind them.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.delta import twin
from refitd_client.delta.arena import Arena, Span
from refitd_client.delta.shadow import Changes, Found
from refitd_client.fingerprint import Bits
from refitd_client.fingerprint.rows import Listed, Rows, bits_at, on_device
from refitd_client.fingerprint.tensors import has_triton
from refitd_client.write import bus

ROOM = 2**23
"""Bytes of a room. It is made larger only for a single part with more changes."""

LONGEST = 2**20
"""Elements of a part: of 16 bits, its changes fit a room whatever changed."""

Counts = NDArray[np.int64]


class Comparison:
    """Of some tensors, by number. Nothing is taken any more when more than `most` elements changed."""

    def __init__(self, device: Any, tensors: int, most: int, *, expected: int = 0, room: int | None = None) -> None:
        """`expected` changes are made room for at once, on the host. Rooms on the device are of `room` bytes."""
        self.count = 0
        self.out = Side(device)
        self._most = most
        self.kernels: Any = twin
        if device.type == "cuda" and has_triton():
            from refitd_client.delta import kernel

            self.kernels = kernel
        self._keys = self.kernels.column_keys(device)
        self._sums = torch.zeros((tensors, 2), dtype=torch.int64, device=device)
        self._indices, self._values = (Arena(expected, is_pinned=device.type == "cuda") for _ in range(2))
        self._size = ROOM if room is None else room
        self._rooms = [_Room(device), _Room(device)]
        self._lumps: list[_Lump] = []

    @property
    def is_too_much(self) -> bool:
        """Whether more elements changed than anybody wants to know of: the base is not up to date then."""
        return self.count > self._most

    def run(self, tally: "Tally", begin: int, end: int, *, update: bool) -> Counts:
        """Compare the parts from `begin` to `end` of a list; say how many elements changed in each.

        With `update` their base becomes what is there now.
        """
        counts = tally.totals(begin, end, self.kernels)
        total = int(counts.sum())
        self.count += total
        if total and not self.is_too_much:
            index, value = _types(tally.rows.listed)
            self._indices.reserve(total, index)
            self._values.reserve(total, value)
            numbers = tally.rows.listed.numbers
            for low, high in _groups(counts, self._size // (index.itemsize + 2 * value.itemsize)):
                spans = self._extract(tally, begin + low, begin + high, int(counts[low:high].sum()), update=update)
                self._lumps.append(_Lump(numbers[begin + low : begin + high], counts[low:high], *spans))
        return counts

    def changes(self, names: Sequence[str]) -> Changes:
        """All that was found, by the names of the tensors. Waits until it is there."""
        sums = self._sums.cpu().numpy()
        self.out.wait()
        shifts, bad = sums[:, 0].view(np.uint64), sums[:, 1]
        return Changes(
            count=self.count,
            found={names[number]: found for number, found in _by_tensor(self._lumps)},
            shifts=dict(_named(names, shifts)),
            nonfinite=dict(_named(names, bad)),
        )

    def _extract(self, tally: "Tally", begin: int, end: int, total: int, *, update: bool) -> tuple[Span, Span]:
        """Take the `total` changes of some parts."""
        rows = tally.rows
        room = self._rooms[0]
        self._rooms.reverse()
        spaces = room.spaces(total, _types(rows.listed), self._size)
        self.kernels.take(
            rows, rows.listed.begins[begin], rows.listed.begins[end], starts=tally.starts, keys=self._keys,
            sums=self._sums, rooms=spaces, update=update,
        )  # fmt: skip
        with self.out.after_this():
            spans = self._indices.fill(spaces[0]), self._values.fill(spaces[1])
            room.is_free = self.out.mark()
        return spans


class _Room:
    """Memory of the device for the changes of some parts, until they were sent on."""

    def __init__(self, device: Any) -> None:
        """Takes nothing before it is needed."""
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.is_free: Any = None

    def spaces(self, count: int, types: tuple[Any, Any], size: int) -> list[Any]:
        """Space for indices, values, and the values before, along the current stream. `size` bytes are kept for it."""
        if self.is_free is not None:  # what is in it is being sent, by another stream
            torch.cuda.current_stream(self._device).wait_event(self.is_free)
        index, value = types
        ends = np.cumsum([_even(count * kind.itemsize) for kind in (index, value, value)]).tolist()
        if ends[-1] > len(self._memory):
            self._memory = torch.empty(max(ends[-1], size), dtype=torch.uint8, device=self._device)
        return [
            self._memory[begin : begin + count * kind.itemsize].view(kind)
            for begin, kind in zip([0, *ends], (index, value, value), strict=False)
        ]


class Side:
    """A stream beside the current one. Without a GPU everything happens at once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_this(self) -> Any:
        """A block on this stream, after what the current one has been given."""
        self.follow()
        return self.beside()

    def follow(self) -> None:
        """What is sent from here on waits for what the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def send(self, target: int, source: int, count: int) -> None:
        """Begin to copy bytes of the device to an address in host memory."""
        if self._stream is None:
            bus.copy_here(target, source, count)
        elif bus.has_driver():
            bus.copy("down", target, source, count, self._stream)
        else:
            with self.beside():
                there = bits_at(source, count, 1, self._device)
                bits_at(target, count, 1, torch.device("cpu")).copy_(there, non_blocking=True)

    def beside(self) -> Any:
        """A block on this stream, which waits for nobody."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """What another stream can wait for: all that this one has been given."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._stream is not None:
            self._stream.synchronize()


class Tally:
    """Where the changes of each row of a list begin: 8 bytes a row on the device."""

    def __init__(self, rows: Rows) -> None:
        """Nothing is counted."""
        self.rows = rows
        self.starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        self._begins = on_device(rows.listed.begins, rows.device)
        self._here = torch.empty(len(self._begins), dtype=torch.int64, pin_memory=rows.device.type == "cuda")

    def totals(self, begin: int, end: int, kernels: Any) -> Counts:
        """Count the changes of the parts from `begin` to `end`. Those before have been counted."""
        low, high = self.rows.listed.begins[begin], self.rows.listed.begins[end]
        kernels.count(self.rows, low, high, self.starts[1:])  # each row's where the next one begins
        self.starts[low : high + 1].cumsum_(0)
        here = self._here[begin : end + 1]
        kernels.report(self.starts, self._begins[begin : end + 1], here)
        if self.starts.is_cuda:
            torch.cuda.current_stream(self.starts.device).synchronize()
        return np.diff(here.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class _Lump:
    """The changes of some parts that follow each other: the parts' tensors, and how many changed in each."""

    numbers: NDArray[np.int64]
    counts: Counts
    indices: Span
    values: Span

    def leads_to(self, other: "_Lump") -> bool:
        """Whether another one lies right behind this one."""
        return self.indices.leads_to(other.indices) and self.values.leads_to(other.values)


def _by_tensor(lumps: Sequence[_Lump]) -> Iterator[tuple[int, Found]]:
    """Each tensor's changes: where they lie if they lie in one piece, and put together else."""
    found: dict[int, list[tuple[Bits, Bits]]] = {}
    for run in _runs(lumps):
        numbers, counts = (np.concatenate(each) for each in zip(*((x.numbers, x.counts) for x in run), strict=True))
        indices = run[0].indices.and_on(run[-1].indices).array()
        values = run[0].values.and_on(run[-1].values).array()
        numbers, ends = numbers[counts > 0], np.cumsum(counts[counts > 0])
        is_last = np.append(numbers[1:] != numbers[:-1], True)
        places = [0, *ends[is_last].tolist()]
        for number, (begin, end) in zip(numbers[is_last].tolist(), pairwise(places), strict=True):
            found.setdefault(number, []).append((indices[begin:end], values[begin:end]))
    for number, pieces in found.items():
        indices, values = zip(*pieces, strict=True)
        yield number, Found(indices=_together(indices), values=_together(values))


def _runs(lumps: Sequence[_Lump]) -> list[list[_Lump]]:
    """Lumps that lie one behind the other, together."""
    runs: list[list[_Lump]] = []
    for lump in lumps:
        if runs and runs[-1][-1].leads_to(lump):
            runs[-1].append(lump)
        else:
            runs.append([lump])
    return runs


def _types(listed: Listed) -> tuple[Any, Any]:
    """Of indices and of values."""
    value = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[listed.width]
    return (torch.int64 if listed.has_long_index else torch.int32), value


def _groups(counts: Counts, most: int) -> Iterator[tuple[int, int]]:
    """Spans of parts with at most `most` changes together, or of one part. Where there are none is left out."""
    ends = np.cumsum(counts)
    begin, before = 0, 0
    while before < ends[-1]:
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        if ends[end - 1] > before:
            yield begin, end
        begin, before = end, ends[end - 1]


def _named(names: Sequence[str], numbers: NDArray[Any]) -> Iterator[tuple[str, int]]:
    """Those that are not 0."""
    places = np.flatnonzero(numbers)
    return ((names[place], number) for place, number in zip(places.tolist(), numbers[places].tolist(), strict=True))


def _together(arrays: Sequence[Bits]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _even(count: int) -> int:
    """Bytes, so that any number may begin behind them."""
    return -(-count // 16) * 16
