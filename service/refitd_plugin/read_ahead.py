"""A GPU's look at a version's tensors where they lie in host memory, begun while the trainer still writes others.

The rank's tensors of a file are read in batches, in their order, each as soon as all of it is written. What is found is
the fingerprints and the values that are not finite; nothing of the tensors stays on the GPU. A rank of several reads
its share of the tensors, whatever slices it will load.

The file may change after the look. So it is of use only where the loads of all ranks, which copy from the file, hold
what they have written against the manifest once more, and put back what was there if it differs (`FullVersion.check`,
and for slices `engine_slices.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd_client.fingerprint.batch import AddressScan
from refitd_client.fingerprint.tensors import Scan
from refitd_plugin.trainer_follower import Files, Layout

BATCH_BYTES = 2**26  # of a batch at least: each is a few launches, and a bus brings it in about a ms


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """Some of a file's tensors: their names, the byte of the file where the last one ends, and what reads them."""

    names: Sequence[str]
    end: int
    scan: AddressScan


@dataclass(slots=True, kw_only=True)
class TensorsAhead:
    """The look at the tensors of a layout, as far as it was begun. `batches` are those of each file, in order."""

    files: Files
    layout: Layout
    batches: Mapping[str, Sequence[ScanBatch]]
    _ends: dict[str, list[Callable[[], list[Scan]]]] = field(init=False)
    _begun: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = {name: [] for name in self.layout}
        self._begun = dict.fromkeys(self.layout, 0)

    def is_of(self, files: Files, layout: Layout) -> bool:
        return self.layout == layout and all(self.files[name] is files[name] for name in layout)

    def advance(self, name: str, end: int) -> None:
        for batch in self.batches[name][len(self._ends[name]) :]:
            if batch.end > end:
                break
            self._ends[name].append(batch.scan.begin())
            self._begun[name] = batch.end

    def finish(self) -> None:
        for name, file in self.layout.items():
            self.advance(name, file.size)

    def drop(self) -> None:
        """See `Ahead`: nothing is to be given back."""

    @property
    def begun(self) -> int:
        return sum(self._begun.values())

    @property
    def is_whole(self) -> bool:
        return all(len(self._ends[name]) == len(batches) for name, batches in self.batches.items())

    def scans(self) -> dict[str, Scan]:
        """What was found, by name, after `finish`. Waits for the GPU."""
        found: dict[str, Scan] = {}
        for name, batches in self.batches.items():
            for batch, end in zip(batches, self._ends[name], strict=True):
                found |= zip(batch.names, end(), strict=True)
        return found


def batches_of(sizes: Sequence[tuple[str, int]], least: int = BATCH_BYTES) -> list[list[str]]:
    """Share tensors out into batches of at least so many bytes, but for the last, in their order. Pure.

    Args:
        sizes: the name and the bytes of each.
        least: bytes of a batch.
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if room <= 0:
            found.append([])
            room = least
        found[-1].append(name)
        room -= size
    return found
