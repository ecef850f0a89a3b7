# pyright: basic
"""The shadow of tensors on a GPU as a copy in host memory: page-locked, so that the bus takes it at its full speed.

    ── chunk k+1 ──▶ room          the copy engine brings the copy, chunk by chunk, into two rooms on the GPU
       chunk k       compare       with the tensors, there
    ◀── chunk k-1 ──               the other copy engine takes what the tensors are now back into the copy, where they
                                   have changed at all

Both directions of the bus are busy at once, so that it takes about as long as one copy of the tensors. Nobody goes over
the copy on the host: to write 1 % of its elements one by one takes longer than to send all of them.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
import torch

from refitd_client import cuda
from refitd_client.delta.change import Indices
from refitd_client.delta.compare import LONGEST, Comparison, Tally
from refitd_client.delta.device import anew, batches, looks, parts_of
from refitd_client.delta.shadow import Changes
from refitd_client.fingerprint import Bits, scan, twin
from refitd_client.fingerprint.rows import Part, Rows, alike
from refitd_client.tensors import TensorSource

_BATCH = 2**28  # bytes of casts' results that are there at a time
CHUNK = 2**25
"""Bytes that go over the bus at a time: two rooms of so many are all that it takes of the GPU."""

_ALIGNMENT = 512  # bytes: as torch places tensors


class StreamShadow:
    """Copies in host memory, one after the other in one page-locked region."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}
        self._region: _Region | None = None
        self._expected = 0

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._region = _Region(sum(_room_of(source) for source in sources), sources)
        end = 0
        for source in sources:
            self._copies[source.entry.name] = self._region.tensor[end : end + source.entry.nbytes]
            end += _room_of(source)
        self._keep(sources)
        return {name: found.fingerprint for name, found in zip(self._copies, scan(looks(sources)), strict=True)}

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """As `Shadow`."""
        if self._region is None:
            return Changes()
        comparison = Comparison(self._region.device, len(sources), most, expected=self._expected)
        lane = _Lane(self._region.device)
        for batch in batches(sources, _BATCH):
            try:
                for parts in alike(part for each in batch for part in self._parts(*each)):
                    _compare(parts, lane, comparison)
            finally:
                lane.wait()  # what is under way goes to and from the region, and from the batch
                comparison.out.wait()
        if comparison.is_too_much:
            self._keep(sources)
            return anew(sources, comparison.count)
        self._expected = min(most, comparison.count * 5 // 4)
        return comparison.changes([source.entry.name for source in sources])

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`."""
        return {name: _unsigned(self._copies[name])[indices] for name, indices in wanted.items()}

    def close(self) -> None:
        """As `Shadow`."""
        self._copies.clear()
        if self._region is not None:
            self._region.close()
            self._region = None

    def _parts(self, number: int, source: TensorSource, bits: Any) -> Iterator[Part]:
        longest = min(LONGEST, CHUNK // bits.element_size())
        return parts_of(number, source, bits, self._copies[source.entry.name], longest)

    def _keep(self, sources: Sequence[TensorSource]) -> None:
        """Copy all that there is."""
        try:
            for source in sources:
                bits = twin.flat_bits(source.tensor())
                copy = self._copies[source.entry.name].view(bits.dtype)
                self._copies[source.entry.name] = copy.copy_(bits, non_blocking=True)
        finally:
            if self._region is not None:
                self._region.wait()


class _Region:
    """Host memory as a tensor of bytes, registered with the driver where the tensors are on a GPU."""

    def __init__(self, size: int, sources: Sequence[TensorSource]) -> None:
        self.device = sources[0].tensor().device if sources else torch.device("cpu")
        memory = mmap(-1, max(1, size))
        self.tensor, undo = torch.frombuffer(memory, dtype=torch.uint8), _nothing
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.tensor, undo = cuda.register(memory) or (self.tensor, undo)
        self.close = weakref.finalize(self, undo)  # what is registered must not be unmapped

    def wait(self) -> None:
        """Until what was sent to it is there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing() -> None:
    """Nothing was registered."""


class _Lane:
    """Two rooms on the device, and the stream that fills them in turns. Without a GPU everything happens at once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.rooms = [torch.empty(CHUNK + _ALIGNMENT, dtype=torch.uint8, device=device) for _ in range(2)]
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._free = [torch.cuda.current_stream(device).record_event() for _ in range(2)]

    def bring(self, number: int, runs: Sequence[tuple[Any, Any]]) -> Any:
        """Send copies on their way into the places in room `number` that they are for."""
        if not self._is_cuda:
            for there, here in runs:
                there.copy_(here)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[number])
            for there, here in runs:
                there.copy_(here, non_blocking=True)
            return self._stream.record_event()

    def arrived(self, sign: Any) -> None:
        """Have the current stream wait for what was brought."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).wait_event(sign)

    def done(self, number: int) -> None:
        """Room `number` is not needed any more."""
        if self._is_cuda:
            self._free[number] = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._is_cuda:
            self._stream.synchronize()


def _compare(parts: Sequence[Part], lane: _Lane, comparison: Comparison) -> None:
    """Parts whose base is in host memory: chunk by chunk, with one on its way while another is compared."""
    copies = [part.base for part in parts]
    chunks, moved = _in_rooms(parts, lane)
    tally = Tally(Rows(moved))
    coming = lane.bring(0, _runs(copies, moved, chunks[0]))
    for number, (begin, end) in enumerate(chunks):
        lane.arrived(coming)
        if number + 1 < len(chunks):
            coming = lane.bring((number + 1) % 2, _runs(copies, moved, chunks[number + 1]))
        counts = comparison.run(tally, begin, end, update=False)
        lane.done(number % 2)
        if not comparison.is_too_much:
            with comparison.out.after_this():
                for at, count in enumerate(counts, begin):
                    if count:
                        copies[at].copy_(moved[at].now, non_blocking=True)


def _in_rooms(parts: Sequence[Part], lane: _Lane) -> tuple[list[tuple[int, int]], list[Part]]:
    """Cut parts into chunks, and give each part a place in the room of its chunk to be compared there."""
    cuts, moved, end = [0], [], 0
    for number, part in enumerate(parts):
        if end + part.now.nbytes > CHUNK + _ALIGNMENT:
            cuts.append(number)
            end = 0
        room = lane.rooms[(len(cuts) - 1) % 2][end : end + part.now.nbytes]
        moved.append(replace(part, base=room.view(part.now.dtype)))
        end += -(-part.now.nbytes // _ALIGNMENT) * _ALIGNMENT
    return list(pairwise([*cuts, len(parts)])), moved


def _runs(copies: Sequence[Any], parts: Sequence[Part], chunk: tuple[int, int]) -> list[tuple[Any, Any]]:
    """A chunk's copies and their places in the room."""
    return [(part.base, copy) for part, copy in zip(parts[slice(*chunk)], copies[slice(*chunk)], strict=True)]


def _room_of(source: TensorSource) -> int:
    return -(-source.entry.nbytes // _ALIGNMENT) * _ALIGNMENT


def _unsigned(copy: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array = copy.numpy()
    return array.view(f"u{array.itemsize}")
