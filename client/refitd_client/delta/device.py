# pyright: basic
"""The shadow of tensors on a GPU as copies on that GPU. It works on any device of torch's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import Indices
from refitd_client.delta.compare import LONGEST, Comparison, Side, Tally
from refitd_client.delta.located import Kept, Located, located
from refitd_client.delta.shadow import Changes
from refitd_client.fingerprint import Bits, Look, fingerprints, scan, twin
from refitd_client.fingerprint.rows import Listed, Rows, alike
from refitd_client.tensors.source import TensorSource


class DeviceShadow:
    """Copies on the device that the tensors are on: as much memory again as they take."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}
        self._lists: Kept[list[Listed]] = Kept()

    def keep(self, sources: Sequence[TensorSource]) -> dict[str, int]:
        """As `Shadow`."""
        self._copies = {source.entry.name: twin.flat_bits(source.tensor()).clone() for source in sources}
        self._lists = Kept()
        return dict(zip(self._copies, fingerprints(self._copies.values()), strict=True))

    def find(self, sources: Sequence[TensorSource], most: int) -> Changes:
        """As `Shadow`. Waits for the device twice, however many tensors there are."""
        device = device_of(self._copies.values())
        with on(device):
            comparison = Comparison(device, len(sources), most)
            try:
                for batch in located(sources):
                    for listed in self._lists.of(batch, lambda batch=batch: self._listed(batch)):
                        comparison.run(Tally(Rows(listed, device)), 0, len(listed.parts), update=True)
            finally:
                comparison.out.wait()  # what is under way comes from rooms that go now
            if comparison.is_too_much:
                for source in sources:
                    self._copies[source.entry.name].copy_(twin.flat_bits(source.tensor()))
                return anew(sources, comparison.count)
            return comparison.changes([source.entry.name for source in sources])

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow`. Along a stream of its own: the trainer's may be full of work by now."""
        device = device_of(self._copies.values())
        with on(device), Side(device).beside():
            return {name: self._gather(name, indices) for name, indices in wanted.items()}

    def close(self) -> None:
        """As `Shadow`."""
        self._copies.clear()

    def _listed(self, batch: Sequence[Located]) -> list[Listed]:
        places = {name: copy.data_ptr() for name, copy in self._copies.items()}
        return list(alike(part for each in batch for part in each.parts(places[each.source.entry.name], LONGEST)))

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


def on(device: Any) -> Any:
    """A block in which a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
