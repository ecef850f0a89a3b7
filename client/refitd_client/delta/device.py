# pyright: basic
"""The shadow of tensors on a GPU as copies on that GPU. It works on any device of torch's.

Addresses of tensors are listed once, and the lists are used for as long as the tensors stay where they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import Indices, elements_of
from refitd_client.delta.compare import LONGEST, Comparison, SideStream, Tally
from refitd_client.delta.shadow import PartPlaces, ShadowDiff
from refitd_client.fingerprint import Bits, ScanInput, fingerprints, scan, torch_ops, width_of
from refitd_client.fingerprint.parts import ElementRows, PartPlace
from refitd_client.fingerprint.rows import EVEN, Listed, Rows, TensorPart, grouped
from refitd_client.fingerprint.tensors import CASTS_BYTES
from refitd_client.tensors import TensorSource

_MadeT = TypeVar("_MadeT")


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self, parts: PartPlaces | None = None) -> None:
        self._parts = parts
        self._copies: dict[str, Any] = {}
        self._lists: AddressCache[list[Listed]] = AddressCache()

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        self._copies = {source.entry.name: torch_ops.flat_bits(source.tensor()).clone() for source in sources}
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
                    self._copies[source.entry.name].copy_(torch_ops.flat_bits(source.tensor()))
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
        """Parts of at most `longest` elements, to compare with the memory at the address `base`.

        Args:
            base: where the copy is.
            longest: a multiple of the elements of a row.
            place: where it lies in a larger tensor; None where it is a whole one.
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
            bits = torch_ops.flat_bits(source.tensor())
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
    """Tensors to scan for fingerprints and for NaN and infinity."""
    return (ScanInput(source.tensor(), rule_of(source.entry.dtype), source.is_view) for source in sources)


def on(device: Any) -> Any:
    """A context in which a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
