# pyright: basic
"""Finding changes on a GPU: comparison, extraction and fingerprints in torch's operations. Works on any device.

A comparison has to wait for the GPU to know how many elements changed, and each operation takes some microseconds to
start. So tensors are looked at in batches: one mask, one extraction, and one sum of shares for all tensors of a batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from refitd_client.delta.change import Indices, index_type
from refitd_client.delta.shadow import Found
from refitd_client.fingerprint import Bits, fingerprints, twin, width_of
from refitd_client.tensors import TensorSource

_BATCH = 2**28  # bytes of tensors on the device that are compared at once
_CHUNK = 2**26  # bytes that go over the bus at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """A part of a tensor from element `first` on: its bits `now`, and those to compare it with."""

    name: str
    first: int
    elements: int  # of the whole tensor
    now: Any
    base: Any

    @property
    def width(self) -> int:
        return self.now.element_size()

    @property
    def nbytes(self) -> int:
        return self.now.numel() * self.now.element_size()


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: twin.flat_bits(source.tensor()).clone() for source in sources}
        return dict(zip(self._copies, fingerprints(list(self._copies.values())), strict=True))

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """As `Shadow`."""
        found: dict[str, Found] = {}
        for batch in _batches(_pieces(sources, self._copies, _BATCH), _BATCH):
            for name, parts in _by_name(_compared(batch, [piece.base for piece in batch], update=True)):
                found[name] = _joined([found[name], *parts] if name in found else parts)
        return found

    def gather(self, name: str, indices: Indices) -> Bits:
        """As `Shadow`."""
        copy = self._copies[name]
        at = torch.from_numpy(indices.astype(np.int64)).to(copy.device)
        return _on_host(copy[at])


class StreamShadow:
    """Copies in host memory, page-locked where there is a GPU, so that they go over the bus at its speed."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        found = fingerprints(self._copied(source) for source in sources)
        if any(copy.is_pinned() for copy in self._copies.values()):
            torch.cuda.synchronize(sources[0].place)
        return dict(zip(self._copies, found, strict=True))

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """As `Shadow`."""
        found = changes_since(self._copies, sources)
        for name, change in found.items():
            self._copies[name].numpy().view(change.values.dtype)[change.indices] = change.values
        return found

    def gather(self, name: str, indices: Indices) -> Bits:
        """As `Shadow`."""
        copy = self._copies[name].numpy()
        return copy.view(f"u{copy.itemsize}")[indices]

    def _copied(self, source: TensorSource) -> Any:
        bits = twin.flat_bits(source.tensor())
        copy = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=bits.is_cuda)
        self._copies[source.entry.name] = copy.copy_(bits, non_blocking=True)
        return bits


def changes_since(base: Mapping[str, Any], sources: Sequence[TensorSource]) -> dict[str, Found]:
    """What changed in tensors on a GPU since a base in host memory, which goes over the bus chunk by chunk.

    `base` has flat host tensors of `twin.flat_bits`' types, such as views of a mapped file; nothing is written to them.
    They should be page-locked (or registered with the driver): the bus takes other memory at a tenth of its speed.
    """
    batches = _batches(_pieces(sources, base, _CHUNK), _CHUNK)
    batch = next(batches, None)
    if batch is None:
        return {}
    lane = _Lane(batch[0].now.device)
    parts: list[tuple[str, Found]] = []
    coming = lane.bring(batch)
    while batch is not None:
        before = lane.arrived(coming)
        following = next(batches, None)
        if following is not None:  # it is on its way while this one is compared
            coming = lane.bring(following)
        parts += _compared(batch, before, update=False)
        lane.done()
        batch = following
    return {name: _joined(pieces) for name, pieces in _by_name(parts)}


class _Lane:
    """Two rooms on the device, filled in turns by a stream of their own. Without a GPU, the chunks themselves."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._turn = self._current = 0
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._rooms = [torch.empty(_CHUNK, dtype=torch.uint8, device=device) for _ in range(2)]
            self._free = [torch.cuda.current_stream(device).record_event() for _ in range(2)]

    def bring(self, batch: Sequence[_Piece]) -> tuple[list[Any], Any]:
        """Send the bases of a batch on their way."""
        if not self._is_cuda:
            return [piece.base for piece in batch], None
        self._turn ^= 1
        room, end = self._rooms[self._turn], 0
        there: list[Any] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[self._turn])
            for piece in batch:
                there.append(room[end : end + piece.nbytes].view(piece.base.dtype))
                there[-1].copy_(piece.base, non_blocking=True)
                end += piece.nbytes
            return there, (self._stream.record_event(), self._turn)

    def arrived(self, coming: tuple[list[Any], Any]) -> list[Any]:
        """The bases, for the current stream."""
        there, sign = coming
        if sign is not None:
            ready, self._current = sign
            torch.cuda.current_stream(self._device).wait_event(ready)
        return there

    def done(self) -> None:
        """What arrived last is not needed any more."""
        if self._is_cuda:
            self._free[self._current] = torch.cuda.current_stream(self._device).record_event()


def _pieces(sources: Sequence[TensorSource], base: Mapping[str, Any], most: int) -> Iterator[_Piece]:
    """Tensors in parts of at most `most` bytes, those of one width together."""
    for source in sorted(sources, key=lambda source: width_of(source.entry.dtype)):
        name, now = source.entry.name, twin.flat_bits(source.tensor())  # one at a time: it may be a cast's result
        elements, step = now.numel(), most // now.element_size()
        for first in range(0, elements, step):
            part = slice(first, first + step)
            yield _Piece(name=name, first=first, elements=elements, now=now[part], base=base[name][part])


def _batches(pieces: Iterable[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Pieces of one width, of at most `most` bytes together."""
    for _, same in groupby(pieces, key=attrgetter("width")):
        batch: list[_Piece] = []
        size = 0
        for piece in same:
            if batch and size + piece.nbytes > most:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.nbytes
        yield batch


def _compared(batch: Sequence[_Piece], before: Sequence[Any], *, update: bool) -> list[tuple[str, Found]]:
    """What changed in the pieces of a batch. With `update`, `before` becomes what is there now."""
    ends = np.cumsum([piece.now.numel() for piece in batch])
    begins = [0, *ends.tolist()]
    mask = torch.empty(begins[-1], dtype=torch.bool, device=batch[0].now.device)
    for piece, old, begin, end in zip(batch, before, begins, begins[1:], strict=False):
        torch.ne(piece.now, old, out=mask[begin:end])
    at = mask.nonzero().reshape(-1)  # waits for the device
    cuts = [0, *torch.searchsorted(at, torch.from_numpy(ends).to(at.device)).tolist()]  # and so does this
    if cuts[-1] == 0:
        return []
    counts = np.diff(cuts)
    local = at - _spread(begins[:-1], counts, at)
    places = local + _spread([piece.first for piece in batch], counts, at)
    spans = [(number, slice(*span)) for number, span in enumerate(pairwise(cuts)) if span[0] < span[1]]
    values = torch.cat([batch[number].now[local[span]] for number, span in spans])
    olds = torch.cat([before[number][local[span]] for number, span in spans])
    if update:
        for number, span in spans:
            before[number][local[span]] = values[span]
    shifts = _shifts(places, olds, values, cuts)
    kind = torch.int32 if index_type(max(piece.elements for piece in batch)) is np.uint32 else torch.int64
    indices, bits = _on_host(places.to(kind)), _on_host(values)
    return [
        (batch[number].name, Found(indices=indices[span], values=bits[span], shift=shifts[number]))
        for number, span in spans
    ]


def _spread(numbers: Sequence[int], counts: Any, like: Any) -> Any:
    """Each number as often as its piece has changes."""
    spread = torch.tensor(numbers, device=like.device)
    return spread.repeat_interleave(torch.from_numpy(counts).to(like.device), output_size=like.numel())


def _shifts(places: Any, olds: Any, values: Any, cuts: Sequence[int]) -> list[int]:
    """What the changes of each piece add to its fingerprint: differences of one running sum, which may wrap around."""
    each = twin.shares(places, values) - twin.shares(places, olds)
    sums = torch.cat([each.new_zeros(1), each.cumsum(0)])[torch.tensor(cuts, device=each.device)]
    return sums.diff().tolist()


def _on_host(tensor: Any) -> Bits:
    """As unsigned integers in host memory, page-locked where there is a GPU: the bus takes no other in one go."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor).numpy()
    return host.view(f"u{host.itemsize}")


def _by_name(pieces: Iterable[tuple[str, Found]]) -> Iterator[tuple[str, list[Found]]]:
    """The pieces of each tensor together. They come tensor by tensor."""
    for name, group in groupby(pieces, key=itemgetter(0)):
        yield name, [found for _, found in group]


def _joined(pieces: Sequence[Found]) -> Found:
    if len(pieces) == 1:
        return pieces[0]
    return Found(
        indices=np.concatenate([piece.indices for piece in pieces]),
        values=np.concatenate([piece.values for piece in pieces]),
        shift=sum(piece.shift for piece in pieces),
    )
