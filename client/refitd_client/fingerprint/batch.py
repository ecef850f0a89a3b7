"""The fingerprints of many tensors that stay where they are, taken again and again: on a GPU in one launch.

A launch for each of a model's hundreds of tensors takes longer than to read them. So where every tensor lies is written
down once, in a table on the device, and each program of one kernel takes the rows of one stretch of it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.definition import MASK, ROW
from refitd_client.fingerprint.tensors import fingerprints, has_triton

ROWS = 64  # of one program: 512 KiB of 16-bit elements
ALIGNED = 16  # bytes: what a GPU loads at once


@dataclass(frozen=True, slots=True)
class Stretch:
    """A contiguous tensor in memory: the address of its first element, how many it has, and their width in bytes."""

    address: int
    elements: int
    width: int


def units(stretches: Sequence[Stretch], slots: Sequence[int]) -> NDArray[np.int64]:
    """Work for the kernel's programs, one row each: address, elements, first row, row after the last, slot."""
    found: list[NDArray[np.int64]] = []
    for stretch, slot in zip(stretches, slots, strict=True):
        rows = -(-stretch.elements // ROW)
        begins = np.arange(0, rows, ROWS, dtype=np.int64)
        unit = np.empty((len(begins), 5), np.int64)
        unit[:] = stretch.address, stretch.elements, 0, 0, slot
        unit[:, 2] = begins
        unit[:, 3] = np.minimum(begins + ROWS, rows)
        found.append(unit)
    return np.concatenate(found) if found else np.empty((0, 5), np.int64)


@dataclass(frozen=True, slots=True)
class Begun:
    """What is under way: the sums of each launch, and the fingerprints that were taken at once."""

    sums: Sequence[Any]
    rest: Sequence[int]


class Batch:
    """Tensors whose memory stays where it is. They are kept alive; their contents may change between calls."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        """Write down where they lie."""
        self._tensors = list(tensors)
        self._rest: list[int] = list(range(len(self._tensors)))
        self._launches: list[_Launch] = []
        if has_triton():
            self._write_down()

    def fingerprints(self) -> list[int]:
        """Their fingerprints now, in order. Waits for each GPU once."""
        return self.end(self.begin())

    def begin(self) -> "Begun":
        """Have them taken along each GPU's current stream, without waiting where kernels take them."""
        sums = [launch.begin(len(self._tensors)) for launch in self._launches]
        return Begun(sums, fingerprints(self._tensors[place] for place in self._rest))

    def end(self, begun: "Begun") -> list[int]:
        """The fingerprints, in order, once the GPUs have them."""
        found = [0] * len(self._tensors)
        for place, number in zip(self._rest, begun.rest, strict=True):
            found[place] = number
        for sums in begun.sums:
            numbers = sums.cpu().numpy().view(np.uint64)
            found = [(some + int(more)) & MASK for some, more in zip(found, numbers, strict=True)]
        return found

    def _write_down(self) -> None:
        groups: dict[tuple[Any, int, bool], list[int]] = {}
        self._rest.clear()
        for place, tensor in enumerate(self._tensors):
            if tensor.is_cuda and tensor.is_contiguous() and tensor.numel() and not tensor.is_neg():
                key = tensor.device, tensor.element_size(), tensor.data_ptr() % ALIGNED == 0
                groups.setdefault(key, []).append(place)
            else:
                self._rest.append(place)
        for (device, width, aligned), places in groups.items():
            stretches = [stretch_of(self._tensors[place]) for place in places]
            self._launches.append(_Launch(device, width, aligned, units(stretches, places)))


def stretch_of(tensor: Any) -> Stretch:
    """Where a contiguous tensor lies."""
    return Stretch(tensor.data_ptr(), tensor.numel(), tensor.element_size())


class _Launch:
    """One launch of the kernel: tensors of one width on one device."""

    def __init__(self, device: Any, width: int, aligned: bool, table: NDArray[np.int64]) -> None:
        torch: Any = sys.modules["torch"]
        self._torch, self._device, self._width, self._aligned = torch, device, width, aligned
        self._table = torch.from_numpy(table).to(device)

    def begin(self, slots: int) -> Any:
        """Sums by slot, once the device has them."""
        from refitd_client.fingerprint import kernel

        out = self._torch.zeros(slots, dtype=self._torch.int64, device=self._device)
        kernel.add_fingerprints(self._table, out, self._width, aligned=self._aligned)
        return out
