"""Whether a delta leads from its base to what its manifest says. Pure: what both hold in, faults out.

Nothing of the base is read for this but headers and manifest: fingerprints say what its tensors are. So a delta is
found bad before a byte of a copy is written: it names a tensor that is not there, or was made from other contents than
its base's, or says that something it does not list has changed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from refitd_client.checkpoint.fault import Code, Fault, shown
from refitd_client.checkpoint.header import BITS
from refitd_client.checkpoint.inventory import Inventory
from refitd_client.checkpoint.strict_header import BITS as ALL_BITS
from refitd_client.contract.manifest import Manifest, TensorsSummary
from refitd_client.contract.naming import DELTA_NAME, version_id
from refitd_client.delta.change import elements_of
from refitd_client.delta.head import bytes_of_change
from refitd_client.delta.layout import MAX_HEADER_BYTES

_FEW = 3
_AGAIN = "publish in full, and start the publisher anew"


@dataclass(frozen=True, slots=True)
class Base:
    """What a delta leads from. `inventory` are the model's tensors, the same from a full version to the last delta on
    it. `fingerprints` are those of its manifest, by name; empty where it has none.
    """

    id: str
    inventory: Inventory
    fingerprints: Mapping[str, str]

    @property
    def most_bytes(self) -> int:
        """The indices and values of a delta that changes every element: no delta on this base has more."""
        return sum(
            elements_of(tensor.dtype, tensor.shape) * bytes_of_change(tensor.dtype, tensor.shape)
            for tensor in self.inventory.tensors.values()
            if tensor.dtype in BITS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRow:
    """One tensor that changed; fingerprints as texts."""

    dtype: str
    shape: tuple[int, ...]
    changed: int
    base: str
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaContents:
    """What a delta's file holds, without the changes themselves. `fault` says why it cannot be read.

    `non_finite` counts by tensor the new values that are NaN or infinite.
    """

    base: str = ""
    version: str = ""
    rows: Mapping[str, DeltaRow]
    non_finite: Mapping[str, int]
    fault: str | None = None


def structure_faults(manifest: Manifest, names: Collection[str], base: Base) -> Iterator[Fault]:
    """What is wrong with a delta as far as manifest and folder tell."""
    if manifest.base != base.id or manifest.delta is None:
        yield Fault(Code.WRONG_BASE, f"refit.json says base {shown(str(manifest.base))}, and it was to be {base.id}")
        return
    if manifest.delta.file != DELTA_NAME:
        yield Fault(Code.BAD_DELTA, f"refit.json has the changes in {shown(manifest.delta.file)}, not in {DELTA_NAME}")
    strange = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pt")))
    if strange:
        yield Fault(
            Code.BAD_DELTA, f"{shown(strange[0])} lies beside a delta, where an engine would take it for weights"
        )
    size = manifest.files[manifest.delta.file].size
    if size > base.most_bytes + MAX_HEADER_BYTES:
        most = f"one on {base.id} has at most {base.most_bytes} of indices and values, for every element of its tensors"
        yield Fault(Code.BAD_DELTA, f"{DELTA_NAME} has {size} bytes, more than any delta can have: {most}")
    if manifest.tensors != _summary(base.inventory):
        yield Fault(Code.WRONG_BASE, f"refit.json speaks of other tensors than those of its base {base.id}: {_AGAIN}")
    if manifest.fingerprints and manifest.fingerprints.keys() != base.inventory.tensors.keys():
        yield Fault(Code.WRONG_BASE, f"refit.json has fingerprints of other tensors than its base {base.id} has")


def content_faults(manifest: Manifest, delta: DeltaContents, base: Base) -> Iterator[Fault]:
    """What is wrong with what its file holds."""
    if delta.fault is not None:
        yield Fault(Code.BAD_DELTA, f"{DELTA_NAME} cannot be used: {delta.fault}")
        return
    expected = version_id(manifest.run, manifest.order)
    if (delta.base, delta.version) != (base.id, expected):
        yield Fault(
            Code.WRONG_BASE,
            f"{DELTA_NAME} leads from {delta.base} to {delta.version}, and refit.json says {base.id} to {expected}",
        )
    for name, row in delta.rows.items():
        yield from _row_faults(name, row, manifest, base)
    for name, text in base.fingerprints.items() if manifest.fingerprints else ():
        if name not in delta.rows and manifest.fingerprints.get(name) != text:
            yield Fault(
                Code.WRONG_BASE, f"tensor {shown(name)} has another fingerprint than in {base.id}, and no changes"
            )
    for name, count in list(delta.non_finite.items())[:_FEW]:
        text = f"tensor {shown(name)} has {count} new value{'s' * (count > 1)} that are NaN or infinite"
        yield Fault(Code.NON_FINITE, f"{text}: the trainer has diverged or wrote damage")


def fits(name: str, row: DeltaRow, base: Base) -> bool:
    """Whether a tensor that a delta changes is one of the base's: then that bounds what its changes take."""
    tensor = base.inventory.tensors.get(name)
    return tensor is not None and (row.dtype, row.shape) == (tensor.dtype, tensor.shape)


def _row_faults(name: str, row: DeltaRow, manifest: Manifest, base: Base) -> Iterator[Fault]:
    tensor = base.inventory.tensors.get(name)
    if tensor is None:
        yield Fault(Code.WRONG_BASE, f"it changes tensor {shown(name)}, which its base {base.id} does not have")
        return
    if not fits(name, row, base):
        text = f"it changes tensor {shown(name)} as {row.dtype} {list(row.shape)}, and in {base.id} it is {tensor}"
        yield Fault(Code.WRONG_BASE, text)
    if base.fingerprints.get(name, row.base) != row.base:
        text = f"it was made from a tensor {shown(name)} with fingerprint {row.base}, and that of {base.id} has"
        yield Fault(Code.WRONG_BASE, f"{text} {base.fingerprints[name]}: {_AGAIN}")
    if manifest.fingerprints.get(name, row.result) != row.result:
        yield Fault(Code.BAD_DELTA, f"tensor {shown(name)} is to get another fingerprint than refit.json says")


def _summary(inventory: Inventory) -> TensorsSummary:
    tensors = list(inventory.tensors.values())
    kinds = sorted({tensor.dtype for tensor in tensors})
    return TensorsSummary(
        count=len(tensors),
        bytes=sum(prod(tensor.shape) * ALL_BITS[tensor.dtype] // 8 for tensor in tensors),
        dtypes={kind: sum(tensor.dtype == kind for tensor in tensors) for kind in kinds},
    )
