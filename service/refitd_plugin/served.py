"""What an engine holds and what it is made of: a full version, and the deltas that were applied to it since."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.delta.change import Delta
from refitd_client.fingerprint.torch_ops import flat_bits
from refitd_plugin.changes import DeltaChanges, DeltaHandle
from refitd_plugin.slices import SliceSums
from refitd_plugin.source import VersionSource

MOST_DELTAS = 200  # each is a descriptor, and one more file to go through when a version is put back


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedState:
    """A version that is served. `contents` are the fingerprints of the model's tensors, `fingerprints` those of the
    checkpoint's tensors that lie whole in it, and `slice_sums` what lies in it in slices of others, where it is known.
    """

    source: VersionSource
    deltas: tuple[DeltaHandle, ...] = ()
    contents: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    fingerprints: Sequence[tuple[str, int]] = field(default=(), repr=False)
    slice_sums: SliceSums | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """The id of the version."""
        return self.deltas[-1].label if self.deltas else self.source.label

    @property
    def folder(self) -> Path:
        """The folder of what was loaded last."""
        return (self.deltas[-1] if self.deltas else self.source).place.folder

    def tensors(self) -> Mapping[str, Any]:
        """Its tensors by name, as a full version of it would have them.

        Raises:
            SourceRefusedError: the file of a delta is not what it was. OSError: it cannot be read.
        """
        tensors = self.source.tensors()
        return Patched(tensors, [each.read() for each in self.deltas]) if self.deltas else tensors

    def followed_by(self, handle: DeltaHandle) -> tuple[DeltaHandle, ...]:
        """The deltas after one more. One that leads from the full version itself replaces all before it."""
        return (handle,) if handle.base == self.source.label else (*self.deltas, handle)


class Patched(Mapping[str, Any]):
    """Tensors with deltas applied: each is changed, as a copy, when it is read."""

    def __init__(self, tensors: Mapping[str, Any], deltas: Sequence[Delta]) -> None:
        self._tensors, self._deltas = tensors, deltas

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        changes = [each.changes[name] for each in self._deltas if name in each.changes]
        if changes:
            tensor = tensor.clone()
            bits = flat_bits(tensor).numpy()
            for change in changes:
                bits.view(change.values.dtype)[change.indices] = change.values
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def leads_from(changes: DeltaChanges, label: str) -> bool:
    """Whether a delta's base is that version, or an earlier one of the same generation: by their ids."""
    base, held, version = (parse_version_id(each) for each in (changes.base, label, changes.label))
    if base is None or held is None or version is None or len({base[0], held[0], version[0]}) > 1:
        return False
    before: Order = held[1]
    return changes.base == label or (
        base[1].generation == before.generation and base[1].step <= before.step and before < version[1]
    )
