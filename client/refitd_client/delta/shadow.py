"""The weights as they were published last, kept so that the next step's changes can be found.

Three ways to keep them, by where the tensors are:

    HostShadow     tensors in host memory: a copy beside them
    DeviceShadow   tensors on a GPU, `shadow="gpu"`: a copy on the GPU; a step is compared at the memory's speed
    StreamShadow   tensors on a GPU, `shadow="stream"`: a copy in host memory that goes over the bus chunk by chunk; no
                   GPU memory but two chunks

They are copies of its own, never a version's files: those may be recycled and written again meanwhile.

`find` compares, takes the changes over into the shadow, and says what they do to the fingerprints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from refitd_client.delta.change import Indices
from refitd_client.delta.find import changed
from refitd_client.fingerprint import Bits, bits_of, fingerprint, share, width_of
from refitd_client.tensors import HOST, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """One tensor's changes since the shadow: where, what is there now, and what is to be added to the fingerprint."""

    indices: Indices
    values: Bits
    shift: int


class Shadow(Protocol):
    """A copy of some tensors' bits."""

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """Take copies, and give the tensors' fingerprints."""
        ...

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """The tensors that changed. From here on the shadow holds what they are now."""
        ...

    def gather(self, name: str, indices: Indices) -> Bits:
        """The shadow's bits at some indices of a tensor."""
        ...


class HostShadow:
    """Copies in host memory of tensors in host memory."""

    def __init__(self) -> None:
        self._copies: dict[str, Bits] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: _bits(source).copy() for source in sources}
        return {name: fingerprint(bits) for name, bits in self._copies.items()}

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """As `Shadow`."""
        looked = {source.entry.name: self._find(source) for source in sources}
        return {name: found for name, found in looked.items() if found is not None}

    def gather(self, name: str, indices: Indices) -> Bits:
        """As `Shadow`."""
        return self._copies[name][indices]

    def _find(self, source: TensorSource) -> Found | None:
        now, copy = _bits(source), self._copies[source.entry.name]
        indices = changed(copy, now)
        if len(indices) == 0:
            return None
        values = now[indices]
        shift = share(indices, values) - share(indices, copy[indices])
        copy[indices] = values
        return Found(indices=indices, values=values, shift=shift)


class Shadows:
    """The shadow of a whole state dict: each tensor with the shadow for its place."""

    def __init__(self, sources: Sequence[TensorSource], *, stream: bool) -> None:
        """Take copies of all tensors. `fingerprints` are theirs, and are kept up to date by `find`."""
        self._stream = stream
        self.fingerprints: dict[str, int] = {}
        self._parts: dict[str, Shadow] = {}
        self._home: dict[str, str] = {}
        for place, part in _by_place(sources).items():
            self._parts[place] = self._shadow_for(place)
            self.fingerprints |= self._parts[place].keep(part)
            self._home |= dict.fromkeys((source.entry.name for source in part), place)

    def fits(self, sources: Sequence[TensorSource]) -> bool:
        """Whether these are the same tensors in the same places."""
        homes = {source.entry.name: source.place for source in sources}
        return homes == self._home

    def find(self, sources: Sequence[TensorSource]) -> dict[str, Found]:
        """What changed, by name."""
        found: dict[str, Found] = {}
        for place, part in _by_place(sources).items():
            found |= self._parts[place].find(part)
        for name, change in found.items():
            self.fingerprints[name] = (self.fingerprints[name] + change.shift) % 2**64
        return found

    def gather(self, name: str, indices: Indices) -> Bits:
        """What a tensor's elements are now."""
        return self._parts[self._home[name]].gather(name, indices)

    def _shadow_for(self, place: str) -> Shadow:
        if place == HOST:
            return HostShadow()
        from refitd_client.delta import device

        return device.StreamShadow() if self._stream else device.DeviceShadow()


def _by_place(sources: Sequence[TensorSource]) -> Mapping[str, list[TensorSource]]:
    parts: dict[str, list[TensorSource]] = {}
    for source in sources:
        parts.setdefault(source.place, []).append(source)
    return parts


def _bits(source: TensorSource) -> Bits:
    return bits_of(np.ascontiguousarray(source.read()), width_of(source.entry.dtype))
