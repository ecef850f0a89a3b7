# pyright: basic
"""The shadow of tensors on a GPU. It works on any device of torch's. Addresses of tensors are listed once, and the
lists are used for as long as the tensors stay where they are.

`DeviceShadow` has copies on that GPU. `StreamShadow` has a copy in host memory, which is page-locked, so that the bus
takes it at its full speed:

    ── chunk k+1 ──▶ room          the copy engine brings the copy, chunk by chunk, into two rooms on the GPU
       chunk k       compare       with the tensors, there
    ◀── chunk k-1 ──               the other copy engine takes the tensors' present bits back into the copy, where they
                                   have changed at all

Both directions of the bus are busy at once, so it takes about as long as one copy of the tensors. The processors never
go over the copy: writing 1 % of its elements one by one takes longer than sending all of them. What is in a chunk, and
where, is computed once (`chunked`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import Indices, elements_of
from refitd_client.delta.compare import LONGEST, Comparison, SideStream, Tally
from refitd_client.delta.shadow import PartPlaces, ShadowDiff
from refitd_client.fingerprint import Bits, ScanInput, fingerprints, scan, width_of
from refitd_client.fingerprint.device import EVEN, Listed, Rows, TensorPart, bits_at, flat_bits, grouped
from refitd_client.fingerprint.tensors import CASTS_BYTES, ElementRows, PartPlace
from refitd_client.tensors import TensorSource
from refitd_client.write import cuda

_MadeT = TypeVar("_MadeT")


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self, parts: PartPlaces | None = None) -> None:
        self._parts = parts
        self._copies: dict[str, Any] = {}
        self._lists: AddressCache[list[Listed]] = AddressCache()

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        self._copies = {source.entry.name: flat_bits(source.tensor()).clone() for source in sources}
        self._lists = AddressCache()
        if self._parts is not None:
            return {}
        return dict(zip(self._copies, fingerprints(self._copies.values()), strict=True))

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        """As `Shadow`. Waits for the device twice, however many tensors there are."""
        device = self._device()
        with on(device):
            comparison = Comparison(device, len(sources), most)
            try:
                for batch in located(sources):
                    for listed in self._lists.get(batch, lambda batch=batch: self._listed(batch)):
                        comparison.run(Tally(Rows(listed, device)), 0, len(listed.parts), update=True)
            finally:
                comparison.out.wait()  # copies under way come from buffers that are freed now
            if comparison.is_too_much:
                for source in sources:
                    self._copies[source.entry.name].copy_(flat_bits(source.tensor()))
                return scanned_anew(sources if self._parts is None else [], comparison.count)
            return comparison.changes([source.entry.name for source in sources])

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`. On a stream of its own: the trainer's may be full of work by now."""
        device, gathered = self._device(), {}
        with on(device), SideStream(device).current():
            for name, indices in wanted.items():
                at = torch.from_numpy(indices.astype(np.int64)).to(device)
                array = self._copies[name][at].cpu().numpy()
                gathered[name] = array.view(f"u{array.itemsize}")
        return gathered

    def close(self) -> None:
        self._copies.clear()

    def _device(self) -> Any:
        return next((copy.device for copy in self._copies.values()), torch.device("cpu"))

    def _listed(self, batch: Sequence["LocatedTensor"]) -> list[Listed]:
        places = {name: copy.data_ptr() for name, copy in self._copies.items()}
        return list(grouped(parts_of(batch, places, self._parts)))


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor by number, and the address of its bits. `made` are the bits if they were made for it, kept alive."""

    number: int
    source: TensorSource
    address: int
    made: Any = None

    def parts(self, base: int, longest: int, place: PartPlace | None) -> Iterator[TensorPart]:
        """Parts of at most `longest` elements, a multiple of a row's, to compare with the copy at the address `base`.
        `place` is where it lies in a larger tensor, None where it is a whole one.
        """
        entry, at = self.source.entry, 0
        elements, width, rule = elements_of(entry.dtype, entry.shape), width_of(entry.dtype), rule_of(entry.dtype)
        strips = [ElementRows(0, elements)] if place is None else place.strips
        is_even = place is None or not any(strip.count % EVEN for strip in strips)
        for strip in strips:
            for first in range(0, strip.count, longest):
                yield TensorPart(
                    number=self.number,
                    now=self.address + (at + first) * width,
                    base=base + (at + first) * width,
                    count=min(longest, strip.count - first),
                    width=width,
                    first=first,
                    rule=rule,
                    elements=elements if place is None else place.elements,
                    strip=None if place is None else strip,
                    is_even=is_even,
                )
            at += strip.count


def parts_of(
    batch: Sequence[LocatedTensor], bases: Mapping[str, int], places: PartPlaces | None
) -> Iterator[TensorPart]:
    """The parts of all tensors, to compare with the memory at these addresses, by name."""
    for each in batch:
        name = each.source.entry.name
        yield from each.parts(bases[name], LONGEST, None if places is None else places[name])


def located(sources: Sequence[TensorSource]) -> Iterator[list[LocatedTensor]]:
    """Sources in batches whose made bits take little memory.

    The bits of a source that is a view take none, so without casts all come in one batch.
    """
    batch: list[LocatedTensor] = []
    made = 0
    for number, source in enumerate(sources):
        if made >= CASTS_BYTES:
            yield batch
            batch, made = [], 0
        if source.is_view:
            batch.append(LocatedTensor(number, source, source.address))
        else:
            bits = flat_bits(source.tensor())
            batch.append(LocatedTensor(number, source, bits.data_ptr(), bits))
            made += source.entry.nbytes
    yield batch


class AddressCache(Generic[_MadeT]):
    """What was made last for tensors at some addresses. It holds numbers and keeps no tensor alive."""

    def __init__(self) -> None:
        self._key: Any = None
        self._made: _MadeT | None = None

    def get(self, batch: Sequence[LocatedTensor], make: Callable[[], _MadeT]) -> _MadeT:
        """The last result if tensors of the same kind are at the same addresses, else a new one by `make`."""
        key = [(each.source.entry, each.address) for each in batch]
        if self._made is None or key != self._key:
            self._made, self._key = make(), key
        return self._made


def scanned_anew(sources: Sequence[TensorSource], count: int) -> ShadowDiff:
    """The result for tensors of which `count` elements changed, more than are wanted: fingerprints computed again."""
    names = [source.entry.name for source in sources]
    found = dict(zip(names, scan(scan_inputs(sources)), strict=True))
    return ShadowDiff(
        count=count,
        anew={name: each.fingerprint for name, each in found.items()},
        nonfinite={name: each.nonfinite for name, each in found.items() if each.nonfinite},
    )


def scan_inputs(sources: Sequence[TensorSource]) -> Iterator[ScanInput]:
    return (ScanInput(source.tensor(), rule_of(source.entry.dtype), source.is_view) for source in sources)


def on(device: Any) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


ALIGNMENT = 512
"""Bytes: as torch places tensors."""

CHUNK = 24 * 2**20
"""Bytes that go over the bus at a time: two rooms of this size are most of the GPU memory that it takes.

With chunks of half a millisecond the bus never waits for what is begun from Python; with smaller ones it would.
"""

_CHANGES_ROOM = 2**21  # bytes of a buffer for changes; a chunk's fit into it when 2 % of 16-bit elements changed


class StreamShadow:
    """Copies in host memory, one after the other in one page-locked region."""

    def __init__(self, parts: PartPlaces | None = None) -> None:
        self._parts = parts
        self._copies: dict[str, Any] = {}
        self._region: _Region | None = None
        self._expected = 0
        self._chunks: AddressCache[list[Chunked]] = AddressCache()

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        sizes = [_aligned(source.entry.nbytes) for source in sources]
        self._region = _Region(sum(sizes), sources)
        self._chunks = AddressCache()
        end = 0
        for source, size in zip(sources, sizes, strict=True):
            self._copies[source.entry.name] = self._region.tensor[end : end + source.entry.nbytes]
            end += size
        self._copy_all(sources, self._region)
        if self._parts is not None:
            return {}
        return {name: found.fingerprint for name, found in zip(self._copies, scan(scan_inputs(sources)), strict=True)}

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        if self._region is None:
            return ShadowDiff()
        device = self._region.device
        with on(device):
            comparison = Comparison(device, len(sources), most, expected=self._expected, room=_CHANGES_ROOM)
            lane = _Lane(device)
            for batch in located(sources):
                try:
                    for each in self._chunks.get(batch, lambda batch=batch: self._cut(batch)):
                        _compare(each, lane, comparison)
                finally:
                    lane.wait()  # copies under way go to and from the region, and from the batch
                    comparison.out.wait()
            if comparison.is_too_much:
                self._copy_all(sources, self._region)
                return scanned_anew(sources if self._parts is None else [], comparison.count)
            self._expected = min(most, comparison.count * 5 // 4)
            return comparison.changes([source.entry.name for source in sources])

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        copies = {name: self._copies[name].numpy() for name in wanted}
        return {name: copies[name].view(f"u{copies[name].itemsize}")[indices] for name, indices in wanted.items()}

    def close(self) -> None:
        self._copies.clear()
        if self._region is not None:
            self._region.close()
            self._region = None

    def _cut(self, batch: Sequence[LocatedTensor]) -> "list[Chunked]":
        copies = {name: copy.data_ptr() for name, copy in self._copies.items()}
        return chunked(parts_of(batch, copies, self._parts), CHUNK)

    def _copy_all(self, sources: Sequence[TensorSource], region: "_Region") -> None:
        try:
            for source in sources:
                bits = flat_bits(source.tensor())
                copy = self._copies[source.entry.name].view(bits.dtype)
                self._copies[source.entry.name] = copy.copy_(bits, non_blocking=True)
        finally:
            if region.device.type == "cuda":
                torch.cuda.synchronize(region.device)


class _Region:
    """Host memory as a tensor of bytes, registered with the driver where the tensors are on a GPU."""

    def __init__(self, size: int, sources: Sequence[TensorSource]) -> None:
        self.device = sources[0].tensor().device if sources else torch.device("cpu")
        memory = mmap(-1, max(1, size))
        self.tensor, undo = torch.frombuffer(memory, dtype=torch.uint8), lambda: None
        if self.device.type == "cuda":
            self.tensor, undo = cuda.register(memory, self.device) or (self.tensor, undo)
        self.close = weakref.finalize(self, undo)  # registered memory must not be unmapped


class _Lane:
    """Two rooms on the device, and the stream that fills them in turns. Without a GPU everything happens at once."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._rooms = [torch.empty(CHUNK + ALIGNMENT, dtype=torch.uint8, device=device) for _ in range(2)]
        self.places = [_aligned(room.data_ptr()) for room in self._rooms]
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._free = [torch.cuda.current_stream(device).record_event() for _ in range(2)]

    def bring(self, number: int, ranges: "Sequence[CopyRange]") -> Any:
        """Begin to copy into room `number`. Returns the event of its end."""
        room = self.places[number]
        if self._is_cuda:
            self._stream.wait_event(self._free[number])
        for each in ranges:
            if not self._is_cuda:
                cuda.copy_here(room + each.target, each.source, each.count)
            elif cuda.has_driver():
                cuda.copy("up", room + each.target, each.source, each.count, self._stream)
            else:
                with torch.cuda.stream(self._stream):
                    here = bits_at(each.source, each.count, 1, torch.device("cpu"))
                    bits_at(room + each.target, each.count, 1, self.device).copy_(here, non_blocking=True)
        return self._stream.record_event() if self._is_cuda else None

    def arrived(self, event: Any) -> None:
        """Have the current stream wait for what was brought."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).wait_event(event)

    def done(self, number: int) -> None:
        """Room `number` may be filled again after what is queued on the current stream."""
        if self._is_cuda:
            self._free[number] = torch.cuda.current_stream(self.device).record_event()

    def wait(self) -> None:
        """Wait until no copy is under way."""
        if self._is_cuda:
            self._stream.synchronize()


def _compare(each: "Chunked", lane: _Lane, comparison: Comparison) -> None:
    """Compare chunk by chunk, with the next one on its way while one is compared."""
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
            for down in chunk.changed(counts):
                comparison.out.send(down.target, down.source, down.count)


@dataclass(frozen=True, slots=True)
class CopyRange:
    """`count` bytes from the address `source` to `target`: an address, or an offset from a room's begin."""

    target: int
    source: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The parts from `begin` to `end` of a list, and what goes over the bus for them. Numbers only.

    `up` brings the copy's bytes into a room: one range, as long as the tensors lie in the copy in the list's order. Its
    targets count from the room's begin: rooms are allocated for each step, and need not lie where they lay before.
    `down` takes tensors' bytes back into the copy, by tensor; `firsts` are the places of their first parts.
    """

    begin: int
    end: int
    up: Sequence[CopyRange]
    down: Sequence[CopyRange]
    firsts: Sequence[int]

    def changed(self, counts: NDArray[np.int64]) -> list[CopyRange]:
        """The ranges down in which anything changed; `counts` are the changed elements of each part."""
        sums = np.add.reduceat(counts, self.firsts)
        return [self.down[place] for place in np.flatnonzero(sums).tolist()]


@dataclass(frozen=True, slots=True)
class Chunked:
    """A list of parts, whose bases are offsets from the begin of a room, and its chunks."""

    listed: Listed
    chunks: Sequence[Chunk]

    def begins(self, rooms: Sequence[int]) -> NDArray[np.int64]:
        """The address of each part's room: chunks take the rooms in turns."""
        sizes = [chunk.end - chunk.begin for chunk in self.chunks]
        return np.repeat(np.resize(np.array(rooms, np.int64), len(sizes)), sizes)


def chunked(parts: Iterable[TensorPart], size: int) -> list[Chunked]:
    """Cut parts, whose bases are addresses in host memory, into chunks for rooms of `size` bytes. Pure. Raises
    ValueError if a part is larger than a room.
    """
    return [_chunked(listed.parts, size) for listed in grouped(parts)]


def _chunked(parts: Sequence[TensorPart], size: int) -> Chunked:
    moved: list[TensorPart] = []
    chunks: list[Chunk] = []
    begin = 0
    while begin < len(parts):
        ups = [CopyRange(0, parts[begin].base, 0)]
        end = begin
        while end < len(parts) and (up := _extended(ups[-1], parts[end])).target + up.count <= size:
            ups[-1 if up.target == ups[-1].target else len(ups) :] = [up]
            moved.append(replace(parts[end], base=up.target + parts[end].base - up.source))
            end += 1
        if end == begin:
            raise ValueError(f"a part of {parts[begin].count * parts[begin].width} bytes goes into no room of {size}")
        downs: list[CopyRange] = []
        firsts: list[int] = []
        for place, part in enumerate(parts[begin:end]):
            nbytes = part.count * part.width
            if place > 0 and parts[begin + place - 1].number == part.number:
                downs[-1] = replace(downs[-1], count=downs[-1].count + nbytes)
            else:
                downs.append(CopyRange(part.base, part.now, nbytes))
                firsts.append(place)
        chunks.append(Chunk(begin=begin, end=end, up=ups, down=downs, firsts=firsts))
        begin = end
    return Chunked(Listed(moved), chunks)


def _extended(last: CopyRange, part: TensorPart) -> CopyRange:
    """The range with a part in it: the last one, longer, if the part lies right behind it, or a new one."""
    nbytes = part.count * part.width
    if 0 <= part.base - (last.source + last.count) < ALIGNMENT:
        return replace(last, count=part.base + nbytes - last.source)
    return CopyRange(_aligned(last.target + last.count), part.base, nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
