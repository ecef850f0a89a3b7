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
from typing import Any, Protocol

import numpy as np

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.delta.change import Indices, changed
from refitd_client.fingerprint import Bits, bits_of, fingerprint, fingerprints_together, share, terms, width_of
from refitd_client.fingerprint.tensors import PartPlace
from refitd_client.tensors import HOST, TensorSource
from refitd_client.write.plan import Run, runs_of

OTHERS = "the tensors are not those of the last"

PartPlaces = Mapping[str, PartPlace]
"""Where parts lie in larger tensors, by the parts' names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangedElements:
    """One tensor's changes since the shadow: the flat indices, and the bits there now.

    Of a part on a GPU these are indices in the whole tensor. Of one in host memory they are its own, and the bits
    `before` come with them.
    """

    indices: Indices
    values: Bits
    before: Bits | None = None


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
        if self.count > most:
            self.found = {}
        else:
            self.found |= other.found
        self.shifts |= other.shifts
        self.anew |= other.anew
        self.nonfinite |= other.nonfinite


class Shadow(Protocol):
    """A copy of some tensors' bits.

    Where these are `parts` of larger tensors, their own fingerprints are of no use: then none are computed. A GPU finds
    what the changes of a part add to the whole tensor's; those of host memory come with the bits before.
    """

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

    def close(self) -> None: ...


class _Copies:
    """The copies of a run's tensors, one after the other: of tensor `i` the elements `begins[i]` to `begins[i + 1]`.

    Small tensors are compared together: the dozen calls that one takes cost more than its elements.
    """

    def __init__(self, run: Run) -> None:
        width = width_of(run.entries[0].dtype)
        self.run = run
        self.begins = np.cumsum([0, *(entry.nbytes // width for entry in run.entries)])
        self._bits = _bits(run).copy()

    def fingerprints(self) -> dict[str, int]:
        if len(self.run.entries) == 1:
            return {self.run.entries[0].name: fingerprint(self._bits)}
        found = fingerprints_together(self._bits, np.diff(self.begins))
        return {entry.name: each for entry, each in zip(self.run.entries, found, strict=True)}

    def at(self, number: int, indices: Indices) -> Bits:
        """The copy's bits at some indices of one of the tensors."""
        return self._bits[self.begins[number] : self.begins[number + 1]][indices]

    def update(self, *, parts: bool) -> ShadowDiff:
        """Compare the tensors, or `parts`, with the copies, and bring these up to date."""
        now = _bits(self.run)
        at = changed(self._bits, now)
        if len(at) == 0:
            return ShadowDiff()
        values, old = now[at], self._bits[at]
        self._bits[at] = values
        diff_of = self._diff if len(self.run.entries) > 1 else self._diff_of_one
        return diff_of(at, values, old, parts=parts)

    def _diff_of_one(self, at: Indices, values: Bits, old: Bits, *, parts: bool) -> ShadowDiff:
        """The changes of a tensor by itself, which may be all of a large one: `share` takes them in blocks."""
        name, dtype, data = self.run.entries[0].name, self.run.entries[0].dtype, values.view(np.uint8)
        return ShadowDiff(
            count=len(at),
            found={name: ChangedElements(indices=at, values=values, before=old if parts else None)},
            shifts={} if parts else {name: (share(at, values) - share(at, old)) % 2**64},
            nonfinite={name: count_nonfinite(dtype, data)} if any_nonfinite(dtype, data) else {},
        )

    def _diff(self, at: Indices, values: Bits, old: Bits, *, parts: bool) -> ShadowDiff:
        """The changes of several small tensors, by the elements' indices in all of them."""
        cuts = np.searchsorted(at, self.begins)
        touched = np.flatnonzero(cuts[1:] > cuts[:-1])
        starts = cuts[touched]
        indices = at - np.repeat(self.begins[touched].astype(at.dtype), np.diff(starts, append=len(at)))
        diff, dtype = ShadowDiff(count=len(at)), self.run.entries[0].dtype
        names = [self.run.entries[number].name for number in touched.tolist()]
        if not parts:
            shifts = np.add.reduceat(terms(indices, values) - terms(indices, old), starts).tolist()
            diff.shifts = dict(zip(names, shifts, strict=True))
        is_finite = not any_nonfinite(dtype, values.view(np.uint8))
        for number, name in zip(touched.tolist(), names, strict=True):
            here = slice(cuts[number], cuts[number + 1])
            before = old[here] if parts else None
            diff.found[name] = ChangedElements(indices=indices[here], values=values[here], before=before)
            if not is_finite and (count := count_nonfinite(dtype, values[here].view(np.uint8))):
                diff.nonfinite[name] = count
        return diff


class HostShadow:
    """Copies in host memory of tensors in host memory."""

    def __init__(self, *, parts: bool = False) -> None:
        self._are_parts = parts
        self._sources: Sequence[TensorSource] = ()
        self._copies: list[_Copies] = []
        self._places: dict[str, tuple[_Copies, int]] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        self._sources = sources
        self._copies = [_Copies(run) for run in runs_of(sources)]
        self._places = {
            entry.name: (copies, number) for copies in self._copies for number, entry in enumerate(copies.run.entries)
        }
        if self._are_parts:
            return {}
        return {name: each for copies in self._copies for name, each in copies.fingerprints().items()}

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        if any(now is not before for now, before in zip(sources, self._sources, strict=True)):
            now = {source.entry.name: source for source in sources}
            for copies in self._copies:
                copies.run = Run(offset=0, sources=[now[entry.name] for entry in copies.run.entries])
            self._sources = sources
        diff = ShadowDiff()
        for copies in self._copies:
            diff.add(copies.update(parts=self._are_parts), most)
        return diff

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        found: dict[str, Bits] = {}
        for name, indices in wanted.items():
            copies, number = self._places[name]
            found[name] = copies.at(number, indices)
        return found

    def close(self) -> None:
        self._copies, self._places, self._sources = [], {}, ()


class Shadows:
    """The shadow of a whole state dict: each tensor is in the shadow for its place (`TensorSource.place`)."""

    def __init__(self, sources: Sequence[TensorSource], *, stream: bool, parts: PartPlaces | None = None) -> None:
        """Copy all tensors. `fingerprints` are theirs, unless they are `parts`, named with their places in larger
        tensors; `find` keeps them up to date. With `stream` copies of what is on GPUs lie in host memory.
        """
        self.fingerprints: dict[str, int] = {}
        self._are_parts = parts is not None
        self._parts: dict[str, Shadow] = {}
        self._home: dict[str, str] = {}
        for place, part in _by_place(sources).items():
            self._parts[place] = _shadow_for(place, stream=stream, parts=parts)
            self.fingerprints |= self._parts[place].keep(part)
            self._home |= dict.fromkeys((source.entry.name for source in part), place)

    def unfit(self, sources: Sequence[TensorSource]) -> str | None:
        """Why these cannot be compared with it; None where they are the same tensors in the same places."""
        return None if {source.entry.name: source.place for source in sources} == self._home else OTHERS

    def find(self, sources: Sequence[TensorSource], most: int) -> ShadowDiff:
        diff = ShadowDiff()
        for place, part in _by_place(sources).items():
            diff.add(self._parts[place].find(part, most), most)
        for name, shift in () if self._are_parts else diff.shifts.items():
            self.fingerprints[name] = (self.fingerprints[name] + shift) % 2**64
        self.fingerprints |= diff.anew
        return diff

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        gathered: dict[str, Bits] = {}
        for place, part in self._parts.items():
            gathered |= part.gather({name: at for name, at in wanted.items() if self._home[name] == place})
        return gathered

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


class VersionShadows(Protocol):
    """The shadow of all tensors of a version. `sources` are its tensors, or weights of ranks."""

    @property
    def fingerprints(self) -> dict[str, int]:
        """Those of the tensors as they were compared last."""
        ...

    def unfit(self, sources: Any) -> str | None:
        """Why these cannot be compared with it; None where they are the same tensors in the same places."""
        ...

    def find(self, sources: Any, most: int) -> ShadowDiff: ...

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]: ...

    def close(self) -> None: ...


def _shadow_for(place: str, *, stream: bool, parts: PartPlaces | None) -> Shadow:
    if place == HOST:
        return HostShadow(parts=parts is not None)
    from refitd_client.delta.device import DeviceShadow, StreamShadow

    return StreamShadow(parts) if stream else DeviceShadow(parts)


def _by_place(sources: Sequence[TensorSource]) -> Mapping[str, list[TensorSource]]:
    """Tensors by place, in order of name as in a delta's file: a GPU's results then arrive in few large pieces."""
    parts: dict[str, list[TensorSource]] = {}
    for source in sorted(sources, key=lambda source: source.entry.name):
        parts.setdefault(source.place, []).append(source)
    return parts


def _bits(run: Run) -> Bits:
    return bits_of(np.ascontiguousarray(run.read()), width_of(run.entries[0].dtype))
