# pyright: basic
"""The shadow of tensors on a GPU as a copy in host memory: page-locked, so that the bus takes it at its full speed.

    ── chunk k+1 ──▶ room          the copy engine brings the copy, chunk by chunk, into two rooms on the GPU
       chunk k       compare       with the tensors, there
    ◀── chunk k-1 ──               the other copy engine takes what the tensors are now back into the copy, where they
                                   have changed at all

Both directions of the bus are busy at once, so that it takes about as long as one copy of the tensors. Nobody goes over
the copy on the host: to write 1 % of its elements one by one takes longer than to send all of them. What is in a chunk,
and where, is written down once (`chunks.py`).
"""

import weakref
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch

from refitd_client.delta.change import Indices
from refitd_client.delta.chunks import ALIGNMENT, Chunked, Run, chunked
from refitd_client.delta.compare import LONGEST, Comparison, Tally
from refitd_client.delta.device import anew, looks, on
from refitd_client.delta.located import Kept, Located, located
from refitd_client.delta.shadow import Changes
from refitd_client.fingerprint import Bits, scan, twin
from refitd_client.fingerprint.rows import Rows, bits_at
from refitd_client.tensors.source import TensorSource
from refitd_client.write import bus, cuda

CHUNK = 24 * 2**20
"""Bytes that go over the bus at a time: two rooms of so many are most of what it takes of the GPU.

With chunks of half a millisecond the bus never waits for what is begun from Python; with smaller ones it would.
"""

_ROOM = 2**21  # bytes of a room for changes; a chunk's fit into it when 2 % of 16-bit elements changed


class StreamShadow:
    """Copies in host memory, one after the other in one page-locked region."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}
        self._region: _Region | None = None
        self._expected = 0
        self._chunks: Kept[list[Chunked]] = Kept()

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._region = _Region(sum(_room_of(source) for source in sources), sources)
        self._chunks = Kept()
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
        device = self._region.device
        with on(device):
            comparison = Comparison(device, len(sources), most, expected=self._expected, room=_ROOM)
            lane = _Lane(device)
            for batch in located(sources):
                try:
                    for each in self._chunks.of(batch, lambda batch=batch: self._cut(batch)):
                        _compare(each, lane, comparison)
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

    def _cut(self, batch: Sequence[Located]) -> list[Chunked]:
        """What goes over the bus together."""
        copies = {name: copy.data_ptr() for name, copy in self._copies.items()}
        parts = (part for each in batch for part in each.parts(copies[each.source.entry.name], LONGEST))
        return chunked(parts, CHUNK)

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
            self.tensor, undo = cuda.register(memory, self.device) or (self.tensor, undo)
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
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._rooms = [torch.empty(CHUNK + ALIGNMENT, dtype=torch.uint8, device=device) for _ in range(2)]
        self.places = [-(-room.data_ptr() // ALIGNMENT) * ALIGNMENT for room in self._rooms]
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._free = [torch.cuda.current_stream(device).record_event() for _ in range(2)]

    def bring(self, number: int, runs: Sequence[Run]) -> Any:
        """Send copies on their way into the places in room `number` that they are for."""
        room = self.places[number]
        if not self._is_cuda:
            for run in runs:
                bus.copy_here(room + run.target, run.source, run.count)
            return None
        self._stream.wait_event(self._free[number])
        for run in runs:
            self._send(room + run.target, run)
        return self._stream.record_event()

    def arrived(self, sign: Any) -> None:
        """Have the current stream wait for what was brought."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).wait_event(sign)

    def done(self, number: int) -> None:
        """Room `number` is not needed any more."""
        if self._is_cuda:
            self._free[number] = torch.cuda.current_stream(self.device).record_event()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._is_cuda:
            self._stream.synchronize()

    def _send(self, target: int, run: Run) -> None:
        if bus.has_driver():
            bus.copy("up", target, run.source, run.count, self._stream)
        else:
            with torch.cuda.stream(self._stream):
                here = bits_at(run.source, run.count, 1, torch.device("cpu"))
                bits_at(target, run.count, 1, self.device).copy_(here, non_blocking=True)


def _compare(each: Chunked, lane: _Lane, comparison: Comparison) -> None:
    """Parts whose base is in host memory: chunk by chunk, with one on its way while another is compared."""
    tally = Tally(Rows(each.listed, lane.device, each.begins(lane.places)))
    coming = lane.bring(0, each.chunks[0].up)
    for number, chunk in enumerate(each.chunks):
        lane.arrived(coming)
        if number + 1 < len(each.chunks):
            coming = lane.bring((number + 1) % 2, each.chunks[number + 1].up)
        counts = comparison.run(tally, chunk.begin, chunk.end, update=False)
        lane.done(number % 2)
        if not comparison.is_too_much and counts.any():
            comparison.out.follow()
            for run in chunk.changed(counts):
                comparison.out.send(run.target, run.source, run.count)


def _room_of(source: TensorSource) -> int:
    return -(-source.entry.nbytes // ALIGNMENT) * ALIGNMENT


def _unsigned(copy: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array = copy.numpy()
    return array.view(f"u{array.itemsize}")
