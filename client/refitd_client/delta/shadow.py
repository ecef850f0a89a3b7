"""A copy of the weights as they were last published, to find the next step's changes against it.

There are three kinds, by where the tensors are:

    HostShadow     tensors in host memory: a copy beside them
    DeviceShadow   tensors on a GPU, `shadow="gpu"`: a copy on the GPU; a step is compared at the memory's speed
    StreamShadow   tensors on a GPU, `shadow="stream"`: a copy in host memory that goes over the bus chunk by chunk; no
                   GPU memory but two chunks

They are copies of the process's own, never a version's files: those may be recycled and written again meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.delta.change import Indices, changed
from refitd_client.fingerprint import Bits, bits_of, fingerprint, share, width_of
from refitd_client.tensors import HOST, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangedElements:
    """One tensor's changes since the shadow: the flat indices, and the bits there now."""

    indices: Indices
    values: Bits


@dataclass(slots=True, kw_only=True, eq=False)
class ShadowDiff:
    """What changed since the shadow.

    `count` is the number of changed elements. `found` has them by tensor; it is empty where they are more than were
    asked for. `shifts` are what to add to the tensors' fingerprints, `anew` fingerprints that were computed again.
    `nonfinite` counts the changed elements that are NaN or infinite, by tensor.
    """

    count: int = 0
    found: dict[str, ChangedElements] = field(default_factory=dict[str, ChangedElements])
    shifts: dict[str, int] = field(default_factory=dict[str, int])
    anew: dict[str, int] = field(default_factory=dict[str, int])
    nonfinite: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, other: "ShadowDiff", most: int) -> None:
        """Add the changes of other tensors. If they are more than `most` elements together, `found` is dropped."""
        self.count += other.count
        self.found = {} if self.count > most else self.found | other.found
        self.shifts |= other.shifts
        self.anew |= other.anew
        self.nonfinite |= other.nonfinite


class Shadow(Protocol):
    """A copy of some tensors' bits."""

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """Copy the tensors. Returns their fingerprints."""
        ...

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        """Compare the tensors with the copy, and bring the copy up to date.

        If more than `most` elements changed, the result does not say which.
        """
        ...

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """The copy's bits at some indices of some tensors."""
        ...

    def close(self) -> None:
        """Free the copy."""
        ...


class HostShadow:
    """Copies in host memory of tensors in host memory."""

    def __init__(self) -> None:
        self._copies: dict[str, Bits] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: _bits(source).copy() for source in sources}
        return {name: fingerprint(bits) for name, bits in self._copies.items()}

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        """As `Shadow`."""
        diff = ShadowDiff()
        for source in sources:
            name, dtype = source.entry.name, source.entry.dtype
            now, copy = _bits(source), self._copies[name]
            indices = changed(copy, now)
            if len(indices) == 0:
                continue
            values = now[indices]
            shift = (share(indices, values) - share(indices, copy[indices])) % 2**64
            copy[indices] = values
            data = values.view(np.uint8)
            tensor = ShadowDiff(
                count=len(indices),
                found={name: ChangedElements(indices=indices, values=values)},
                shifts={name: shift},
                nonfinite={name: count_nonfinite(dtype, data)} if any_nonfinite(dtype, data) else {},
            )
            diff.add(tensor, most)
        return diff

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`."""
        return {name: self._copies[name][indices] for name, indices in wanted.items()}

    def close(self) -> None:
        """As `Shadow`."""
        self._copies.clear()


class Shadows:
    """The shadow of a whole state dict: each tensor is in the shadow for its place (`TensorSource.place`)."""

    def __init__(self, sources: Sequence[TensorSource], *, stream: bool) -> None:
        """Copy all tensors. `fingerprints` are theirs; `find` keeps them up to date."""
        self.fingerprints: dict[str, int] = {}
        self._parts: dict[str, Shadow] = {}
        self._home: dict[str, str] = {}
        for place, part in _by_place(sources).items():
            self._parts[place] = _shadow_for(place, stream=stream)
            self.fingerprints |= self._parts[place].keep(part)
            self._home |= dict.fromkeys((source.entry.name for source in part), place)

    def fits(self, sources: Sequence[TensorSource]) -> bool:
        """Whether these are the same tensors in the same places."""
        return {source.entry.name: source.place for source in sources} == self._home

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        """As `Shadow.find`, of all tensors."""
        diff = ShadowDiff()
        for place, part in _by_place(sources).items():
            diff.add(self._parts[place].find(part, most), most)
        for name, shift in diff.shifts.items():
            self.fingerprints[name] = (self.fingerprints[name] + shift) % 2**64
        self.fingerprints |= diff.anew
        return diff

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow.gather`, of all tensors."""
        gathered: dict[str, Bits] = {}
        for place, part in self._parts.items():
            gathered |= part.gather({name: at for name, at in wanted.items() if self._home[name] == place})
        return gathered

    def close(self) -> None:
        """Free all copies."""
        for part in self._parts.values():
            part.close()


def _shadow_for(place: str, *, stream: bool) -> Shadow:
    if place == HOST:
        return HostShadow()
    from refitd_client.delta.device import DeviceShadow
    from refitd_client.delta.stream import StreamShadow

    return StreamShadow() if stream else DeviceShadow()


def _by_place(sources: Sequence[TensorSource]) -> Mapping[str, list[TensorSource]]:
    """Tensors by place, in order of name as in a delta's file: a GPU's results then arrive in few large pieces."""
    parts: dict[str, list[TensorSource]] = {}
    for source in sorted(sources, key=lambda source: source.entry.name):
        parts.setdefault(source.place, []).append(source)
    return parts


def _bits(source: TensorSource) -> Bits:
    return bits_of(np.ascontiguousarray(source.read()), width_of(source.entry.dtype))
