"""The fingerprints of many tensors that stay where they are, taken again and again: on a GPU in one launch.

A launch for each of a model's hundreds of tensors takes longer than to read them. So where every tensor lies is written
down once, in lists of rows on the device (`rows.py`), and the kernel goes over these each time.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refitd_client.fingerprint.rows import Part, Rows, alike, whole
from refitd_client.fingerprint.tensors import fingerprints, has_triton
from refitd_client.fingerprint.twin import flat_bits


@dataclass(frozen=True, slots=True)
class Begun:
    """What is under way: the sums on each device, and the fingerprints that were taken at once."""

    sums: Sequence[Any]
    rest: Sequence[int]


class Batch:
    """Tensors whose memory stays where it is. They are kept alive; their contents may change between calls."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        """Write down where they lie. Waits for each GPU's current stream, so that any stream may follow."""
        self._tensors = list(tensors)
        there = [place for place, tensor in enumerate(self._tensors) if has_triton() and _is_read_in_place(tensor)]
        self._rest = sorted(set(range(len(self._tensors))) - set(there))
        self._lists: dict[Any, list[Rows]] = {}
        for device in dict.fromkeys(self._tensors[place].device for place in there):
            parts = [self._part(place) for place in there if self._tensors[place].device == device]
            self._lists[device] = [Rows(each, device) for each in alike(parts)]
            _torch().cuda.current_stream(device).synchronize()

    def fingerprints(self) -> list[int]:
        """Their fingerprints now, in order. Waits for each GPU once."""
        return self.end(self.begin())

    def begin(self) -> Begun:
        """Have them taken along each GPU's current stream, without waiting where kernels take them."""
        sums = [self._sums(device, lists) for device, lists in self._lists.items()]
        return Begun(sums, fingerprints(self._tensors[place] for place in self._rest))

    def end(self, begun: Begun) -> list[int]:
        """The fingerprints, in order, once the GPUs have them."""
        found = dict(zip(self._rest, begun.rest, strict=True))
        for lists, sums in zip(self._lists.values(), begun.sums, strict=True):
            numbers = sums.cpu().numpy()[:, 0].view(np.uint64).tolist()
            found |= {part.number: numbers[part.number] for rows in lists for part in rows.listed.parts}
        return [found[place] for place in range(len(self._tensors))]

    def _part(self, place: int) -> Part:
        return whole(place, flat_bits(self._tensors[place]))  # a view: see _is_read_in_place

    def _sums(self, device: Any, lists: Sequence[Rows]) -> Any:
        from refitd_client.fingerprint import kernel

        out = _torch().zeros((len(self._tensors), 2), dtype=_torch().int64, device=device)
        for rows in lists:
            kernel.add_scan(rows, out)
        return out


def _is_read_in_place(tensor: Any) -> bool:
    return bool(tensor.is_cuda and tensor.is_contiguous() and tensor.numel() and not tensor.is_neg())


def _torch() -> Any:
    return sys.modules["torch"]
