# pyright: basic
"""The shadow of tensors on a GPU as copies on that GPU. It works on any device of torch's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from refitd_client.delta.change import Indices
from refitd_client.delta.compare import LONGEST, Comparison, Tally
from refitd_client.delta.shadow import Changes
from refitd_client.fingerprint import Bits, Look, fingerprints, scan, twin
from refitd_client.fingerprint.rows import Part, Rows, alike
from refitd_client.finite import rule_of
from refitd_client.tensors import TensorSource

_BATCH = 2**28  # bytes of casts' results that are there at a time


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: twin.flat_bits(source.tensor()).clone() for source in sources}
        return dict(zip(self._copies, fingerprints(self._copies.values()), strict=True))

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """As `Shadow`. Waits for the device twice, however many tensors there are."""
        comparison = Comparison(device_of(self._copies.values()), len(sources), most)
        for batch in batches(sources, _BATCH):
            for parts in alike(self._parts(batch)):
                comparison.run(Tally(Rows(parts)), 0, len(parts), update=True)
        if comparison.is_too_much:
            for source in sources:
                self._copies[source.entry.name].copy_(twin.flat_bits(source.tensor()))
            return anew(sources, comparison.count)
        return comparison.changes([source.entry.name for source in sources])

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`."""
        return {name: self._gather(name, indices) for name, indices in wanted.items()}

    def close(self) -> None:
        """As `Shadow`."""
        self._copies.clear()

    def _parts(self, batch: Sequence[tuple[int, TensorSource, Any]]) -> Iterator[Part]:
        for number, source, bits in batch:
            yield from parts_of(number, source, bits, self._copies[source.entry.name], LONGEST)

    def _gather(self, name: str, indices: Indices) -> Bits:
        copy = self._copies[name]
        array = copy[torch.from_numpy(indices.astype(np.int64)).to(copy.device)].cpu().numpy()
        return array.view(f"u{array.itemsize}")


def anew(sources: Sequence[TensorSource], count: int) -> Changes:
    """What there is to say of tensors of which so many elements changed that they are looked at as a whole."""
    names = [source.entry.name for source in sources]
    found = dict(zip(names, scan(looks(sources)), strict=True))
    return Changes(
        count=count,
        anew={name: each.fingerprint for name, each in found.items()},
        nonfinite={name: each.nonfinite for name, each in found.items() if each.nonfinite},
    )


def looks(sources: Sequence[TensorSource]) -> Iterator[Look]:
    """Tensors to be looked at for NaN as well."""
    return (Look(source.tensor(), rule_of(source.entry.dtype), source.is_view) for source in sources)


def device_of(tensors: Iterable[Any]) -> Any:
    """The device of tensors that are all in one place."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def batches(sources: Sequence[TensorSource], most: int) -> Iterator[list[tuple[int, TensorSource, Any]]]:
    """Sources with their numbers and bits, together as long as what was made for it stays below `most` bytes.

    The bits of a source that is a view take no memory, so without casts all come at once.
    """
    batch: list[tuple[int, TensorSource, Any]] = []
    made = 0
    for number, source in enumerate(sources):
        if made >= most:
            yield batch
            batch, made = [], 0
        batch.append((number, source, twin.flat_bits(source.tensor())))
        made += 0 if source.is_view else source.entry.nbytes
    yield batch


def parts_of(number: int, source: TensorSource, bits: Any, base: Any, longest: int) -> Iterator[Part]:
    """A tensor in parts of at most `longest` elements, to be compared with its base."""
    for first in range(0, bits.numel(), longest):
        span = slice(first, first + longest)
        yield Part(
            number=number,
            now=bits[span],
            base=base[span],
            first=first,
            rule=rule_of(source.entry.dtype),
            elements=bits.numel(),
        )
