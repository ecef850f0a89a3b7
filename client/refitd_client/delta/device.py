# pyright: basic
"""Finding changes on a GPU: comparison, extraction and fingerprints in torch's operations. Works on any device.

A comparison has to wait for the GPU to know how many elements changed. Waiting for each tensor would take longer than
comparing them, so tensors are compared in groups, into one mask.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from refitd_client.delta.change import Indices, index_type
from refitd_client.delta.shadow import Found
from refitd_client.fingerprint import Bits, fingerprints, twin
from refitd_client.tensors import TensorSource

_GROUP = 2**28  # elements whose mask is made at once: 256 MiB of it
_CHUNK = 2**26  # bytes that go over the bus at a time


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: twin.flat_bits(source.value).clone() for source in sources}
        return dict(zip(self._copies, fingerprints(list(self._copies.values())), strict=True))

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """As `Shadow`."""
        found: dict[str, Found] = {}
        for group in _groups(sources):
            names = [source.entry.name for source in group]
            now = [twin.flat_bits(source.value) for source in group]
            compared = _compared(names, now, [self._copies[name] for name in names])
            found |= _found(compared, max(bits.numel() for bits in now))
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
        for source in sources:
            bits = twin.flat_bits(source.value)
            copy = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=bits.is_cuda)
            self._copies[source.entry.name] = copy.copy_(bits, non_blocking=True)
        return dict(zip(self._copies, fingerprints([source.value for source in sources]), strict=True))

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """As `Shadow`."""
        found: dict[str, Found] = {}
        for name, pieces in _by_name(self._compared(sources)):
            found[name] = change = _joined(pieces)
            self._copies[name].numpy().view(change.values.dtype)[change.indices] = change.values
        return found

    def gather(self, name: str, indices: Indices) -> Bits:
        """As `Shadow`."""
        copy = self._copies[name].numpy()
        return copy.view(f"u{copy.itemsize}")[indices]

    def _compared(self, sources: Sequence[TensorSource]) -> Iterator[tuple[str, Found]]:
        pieces = [piece for source in sources for piece in self._pieces(source)]
        if not pieces:
            return
        lane = _Lane(pieces[0][2].device)
        coming = lane.bring(pieces[0][3])
        for number, (name, begin, now, _) in enumerate(pieces):
            before = lane.arrived(coming)
            if number + 1 < len(pieces):  # the next one is on its way while this one is compared
                coming = lane.bring(pieces[number + 1][3])
            elements = self._copies[name].numel()
            yield from _found(_compared([name], [now], [before], begin), elements).items()
            lane.done()

    def _pieces(self, source: TensorSource) -> Iterable[tuple[str, int, Any, Any]]:
        name = source.entry.name
        now, copy = twin.flat_bits(source.value), self._copies[name]
        step = _CHUNK // now.element_size()
        for begin in range(0, now.numel(), step):
            yield name, begin, now[begin : begin + step], copy[begin : begin + step]


class _Lane:
    """Two chunks on the device, filled in turns by a stream of their own. Without a GPU, the chunks themselves."""

    def __init__(self, device: Any) -> None:
        self._is_cuda = device.type == "cuda"
        self._turn = 0
        if self._is_cuda:
            self._device = device
            self._room = [torch.empty(_CHUNK, dtype=torch.uint8, device=device) for _ in range(2)]
            self._stream = torch.cuda.Stream(device)
            self._free = [torch.cuda.Event() for _ in range(2)]
            for event in self._free:
                event.record(torch.cuda.current_stream(device))

    def bring(self, chunk: Any) -> tuple[Any, Any]:
        """Send a chunk on its way."""
        if not self._is_cuda:
            return chunk.clone(), None
        self._turn ^= 1
        room = self._room[self._turn][: chunk.numel() * chunk.element_size()].view(chunk.dtype)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[self._turn])
            room.copy_(chunk, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return room, (ready, self._turn)

    def arrived(self, coming: tuple[Any, Any]) -> Any:
        """The chunk, for the current stream."""
        room, sign = coming
        if sign is not None:
            ready, self._current = sign
            torch.cuda.current_stream(self._device).wait_event(ready)
        return room

    def done(self) -> None:
        """The chunk that arrived last is not needed any more."""
        if self._is_cuda:
            self._free[self._current].record(torch.cuda.current_stream(self._device))


def _groups(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    group: list[TensorSource] = []
    size = 0
    for source in sources:
        if group and size + source.value.numel() > _GROUP:
            yield group
            group, size = [], 0
        group.append(source)
        size += source.value.numel()
    if group:
        yield group


def _compared(names: Sequence[str], now: Sequence[Any], before: Sequence[Any], first: int = 0) -> list[tuple[Any, ...]]:
    """Where tensors differ: (name, elements, indices, values, shift), all on the device. `before` becomes `now`."""
    sizes = [bits.numel() for bits in now]
    ends = np.cumsum(sizes)
    mask = torch.empty(int(ends[-1]), dtype=torch.bool, device=now[0].device)
    for bits, old, end, size in zip(now, before, ends, sizes, strict=True):
        torch.ne(bits, old, out=mask[end - size : end])
    at = mask.nonzero().reshape(-1)  # waits for the device
    del mask
    cuts = torch.searchsorted(at, torch.from_numpy(ends).to(at.device)).tolist()  # and so does this
    found: list[tuple[Any, ...]] = []
    for name, bits, old, end, size, begin, cut in zip(names, now, before, ends, sizes, [0, *cuts], cuts, strict=False):
        if begin == cut:
            continue
        indices = at[begin:cut].sub_(int(end - size))
        values = bits[indices]
        places = indices if first == 0 else indices + first
        shift = twin.share(places, values) - twin.share(places, old[indices])
        old[indices] = values
        found.append((name, places, values, shift))
    return found


def _found(compared: Sequence[tuple[Any, ...]], elements: int) -> dict[str, Found]:
    """The same in host memory, with one copy for all indices, one for all shifts, and one for each width of values.

    `elements` are those of the largest of the tensors.
    """
    if not compared:
        return {}
    names, places, values, shifts = zip(*compared, strict=True)
    kind = torch.int32 if index_type(elements) is np.uint32 else torch.int64
    indices = _on_host(torch.cat(places).to(kind))
    shifts = torch.stack(shifts).tolist()
    bits = {
        width: _on_host(torch.cat([each for each in values if each.element_size() == width]))
        for width in {each.element_size() for each in values}
    }
    found: dict[str, Found] = {}
    taken, begin = dict.fromkeys(bits, 0), 0
    for name, each, shift in zip(names, values, shifts, strict=True):
        count, width = each.numel(), each.element_size()
        part = bits[width][taken[width] : taken[width] + count]
        found[name] = Found(indices=indices[begin : begin + count], values=part, shift=shift)
        begin, taken[width] = begin + count, taken[width] + count
    return found


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
