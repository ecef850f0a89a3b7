"""What a delta leads from, and what finds a delta's faults (part `delta-checks` of `refitd_client.parts`)."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from threading import Event
from typing import Any, Protocol

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.header import ALL_BITS
from refitd_client.checkpoint.inventory import Inventory
from refitd_client.checkpoint.opening import FileStat, Folder
from refitd_client.contract.manifest import Manifest, TensorsSummary
from refitd_client.parts import part
from refitd_client.validation.contents import StretchSearch


@dataclass(frozen=True, slots=True)
class Base:
    """What a delta leads from. `inventory` are the model's tensors, the same from a full version to the last delta on
    it. `fingerprints` are those of its manifest, by name; empty if it has none. `pairs` are the output layers that have
    to be copies of embeddings, and those.
    """

    id: str
    inventory: Inventory
    fingerprints: Mapping[str, str]
    pairs: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def summary(self) -> TensorsSummary:
        tensors = self.inventory.tensors.values()
        return TensorsSummary.of((tensor.dtype, prod(tensor.shape) * ALL_BITS[tensor.dtype] // 8) for tensor in tensors)


class ReadDelta(Protocol):
    """A delta's file, whose header has been read."""

    @property
    def searches(self) -> Mapping[str, StretchSearch]:
        """What all of the file is searched by, by its name, before `contents`."""
        ...

    def contents(self, stop: Event) -> Any:
        """Return what it holds, for `content_faults`.

        Raises:
            ChangedError: it is not the file that was listed.
            ReadingStoppedError: `stop` was set.
            OSError: it cannot be read.
        """
        ...


class DeltaChecks(Protocol):
    """What finds a delta's faults."""

    def structure_faults(self, manifest: Manifest, names: Collection[str], base: Base) -> Iterator[Defect]:
        """Yield what is wrong with a delta as far as manifest and names in the folder tell. Pure."""
        ...

    def content_faults(self, manifest: Manifest, delta: Any, base: Base) -> Iterator[Defect]:
        """Yield what is wrong with what the delta's file holds. Pure."""
        ...

    def open_delta(self, folder: Folder, file: FileStat, base: Base) -> ReadDelta:
        """Read the header of a delta that should lead from `base`. Raises as `ReadDelta.contents`."""
        ...


class _NoChecks:
    """Of a tree without the ring: a delta is refused before it is opened."""

    def structure_faults(self, manifest: Manifest, names: Collection[str], base: Base) -> Iterator[Defect]:
        yield Defect(Code.UNSUPPORTED_KIND, "it is a delta, and this installation of refitd reads none")

    def content_faults(self, manifest: Manifest, delta: Any, base: Base) -> Iterator[Defect]:
        yield from self.structure_faults(manifest, (), base)

    def open_delta(self, folder: Folder, file: FileStat, base: Base) -> ReadDelta:
        raise NotImplementedError


def delta_checks() -> DeltaChecks:
    """Return what finds a delta's faults."""
    return part("delta-checks") or _NoChecks()
