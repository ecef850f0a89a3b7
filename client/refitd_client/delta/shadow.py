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
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.delta.change import Indices
from refitd_client.delta.find import changed
from refitd_client.fingerprint import Bits, bits_of, fingerprint, share, width_of
from refitd_client.tensors.source import HOST, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """One tensor's changes since the shadow: where, and what is there now."""

    indices: Indices
    values: Bits


@dataclass(slots=True, kw_only=True, eq=False)
class Changes:
    """What changed since the shadow: so many elements, and by tensor.

    `found` has the tensors that changed; nothing where more elements did than were asked for. `shifts` are what is to
    be added to their fingerprints, `anew` fingerprints that were computed again, `nonfinite` how many of their changed
    elements are NaN or infinite.
    """

    count: int = 0
    found: dict[str, Found] = field(default_factory=dict[str, Found])
    shifts: dict[str, int] = field(default_factory=dict[str, int])
    anew: dict[str, int] = field(default_factory=dict[str, int])
    nonfinite: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, other: "Changes", most: int) -> None:
        """Take over those of other tensors. With more than `most` elements together, where they are is dropped."""
        self.count += other.count
        self.found = {} if self.count > most else self.found | other.found
        self.shifts |= other.shifts
        self.anew |= other.anew
        self.nonfinite |= other.nonfinite


class Shadow(Protocol):
    """A copy of some tensors' bits."""

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """Take copies, and give the tensors' fingerprints."""
        ...

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """What changed. From here on the shadow holds what the tensors are now.

        Where more than `most` elements changed nobody wants to know which.
        """
        ...

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """The shadow's bits at some indices of some tensors."""
        ...

    def close(self) -> None:
        """Let go of the copies."""
        ...


class HostShadow:
    """Copies in host memory of tensors in host memory."""

    def __init__(self) -> None:
        self._copies: dict[str, Bits] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: _bits(source).copy() for source in sources}
        return {name: fingerprint(bits) for name, bits in self._copies.items()}

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """As `Shadow`."""
        changes = Changes()
        for source in sources:
            changes.add(self._find(source), most)
        return changes

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`."""
        return {name: self._copies[name][indices] for name, indices in wanted.items()}

    def close(self) -> None:
        """As `Shadow`."""
        self._copies.clear()

    def _find(self, source: TensorSource) -> Changes:
        name, dtype = source.entry.name, source.entry.dtype
        now, copy = _bits(source), self._copies[name]
        indices = changed(copy, now)
        if len(indices) == 0:
            return Changes()
        values = now[indices]
        shift = (share(indices, values) - share(indices, copy[indices])) % 2**64
        copy[indices] = values
        data = values.view(np.uint8)
        return Changes(
            count=len(indices),
            found={name: Found(indices=indices, values=values)},
            shifts={name: shift},
            nonfinite={name: count_nonfinite(dtype, data)} if any_nonfinite(dtype, data) else {},
        )


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

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """What changed, as `Shadow.find` says it."""
        changes = Changes()
        for place, part in _by_place(sources).items():
            changes.add(self._parts[place].find(part, most), most)
        for name, shift in changes.shifts.items():
            self.fingerprints[name] = (self.fingerprints[name] + shift) % 2**64
        self.fingerprints |= changes.anew
        return changes

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """What tensors' elements are now, by name."""
        gathered: dict[str, Bits] = {}
        for place, part in self._parts.items():
            gathered |= part.gather({name: at for name, at in wanted.items() if self._home[name] == place})
        return gathered

    def close(self) -> None:
        """Let go of all copies."""
        for part in self._parts.values():
            part.close()

    def _shadow_for(self, place: str) -> Shadow:
        if place == HOST:
            return HostShadow()
        from refitd_client.delta.device import DeviceShadow
        from refitd_client.delta.stream import StreamShadow

        return StreamShadow() if self._stream else DeviceShadow()


def _by_place(sources: Sequence[TensorSource]) -> Mapping[str, list[TensorSource]]:
    """By name, as a delta's file has them: then what a GPU finds arrives as it is written, in few large pieces."""
    parts: dict[str, list[TensorSource]] = {}
    for source in sorted(sources, key=lambda source: source.entry.name):
        parts.setdefault(source.place, []).append(source)
    return parts


def _bits(source: TensorSource) -> Bits:
    return bits_of(np.ascontiguousarray(source.read()), width_of(source.entry.dtype))
