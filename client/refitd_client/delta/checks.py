"""Whether a delta leads from its base to what its manifest says (`validation.base.DeltaChecks`).

Of the base only headers and manifest are read for this: fingerprints stand for its tensors. So a delta is found bad
before a byte of a copy is written: it names a tensor that is not there, or was made from other contents than its
base's, or says that something it does not list has changed.

The delta's own file is read in pieces, with a fixed amount of memory (`DeltaReading`). It may have holes: its
blocks on disk say nothing of what it takes to read it, and compression, shared blocks and network file systems make
honest files look as if they had holes, too. So the size that counts is the one that the file says, and the base bounds
that: no delta lists an element twice.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Event

from refitd_client.checkpoint.fault import Code, Defect, shown
from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite, kind_of
from refitd_client.checkpoint.header import BITS, SCALES_END
from refitd_client.checkpoint.inventory import not_a_copy
from refitd_client.checkpoint.opening import FileStat, Folder, check_unchanged
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import DELTA_NAME, version_id
from refitd_client.delta import DeltaFile, DeltaRefusedError
from refitd_client.delta.change import elements_of
from refitd_client.delta.head import MAX_HEADER_BYTES, Head, TensorRecord, bytes_of_change
from refitd_client.delta.reader import ChangesSearch
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.validation.base import Base
from refitd_client.validation.contents import ReadingStoppedError

_TENSORS_TOLD = 3
_ADVICE = "publish in full, and start the publisher anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaContents:
    """What a delta's file holds, without the changes themselves. `fault` says why it cannot be read.

    `non_finite` counts by tensor the new values that are NaN or infinite.
    """

    base: str = ""
    version: str = ""
    rows: Mapping[str, TensorRecord]
    non_finite: Mapping[str, int]
    fault: str | None = None


def most_bytes_on(base: Base) -> int:
    """Return the bytes of indices and values of a delta that changes every element: no delta on this base has more."""
    return sum(
        elements_of(tensor.dtype, tensor.shape) * bytes_of_change(tensor.dtype, tensor.shape)
        for tensor in base.inventory.tensors.values()
        if tensor.dtype in BITS
    )


def structure_faults(manifest: Manifest, names: Collection[str], base: Base) -> Iterator[Defect]:
    """What is wrong with a delta as far as manifest and names in the folder tell. Pure."""
    if manifest.base != base.id or manifest.delta is None:
        yield Defect(Code.WRONG_BASE, f"refit.json says base {shown(str(manifest.base))}, and it was to be {base.id}")
        return
    if manifest.delta.file != DELTA_NAME:
        yield Defect(Code.BAD_DELTA, f"refit.json has the changes in {shown(manifest.delta.file)}, not in {DELTA_NAME}")
    strange = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pt")))
    if strange:
        yield Defect(
            Code.BAD_DELTA, f"{shown(strange[0])} lies beside a delta, where an engine would take it for weights"
        )
    size, most_bytes = manifest.files[manifest.delta.file].size, most_bytes_on(base)
    if size > most_bytes + MAX_HEADER_BYTES:
        most = f"one on {base.id} has at most {most_bytes} of indices and values, for every element of its tensors"
        yield Defect(Code.BAD_DELTA, f"{DELTA_NAME} has {size} bytes, more than any delta can have: {most}")
    if manifest.tensors != base.summary:
        yield Defect(Code.WRONG_BASE, f"refit.json describes other tensors than those of its base {base.id}: {_ADVICE}")
    if manifest.fingerprints and manifest.fingerprints.keys() != base.inventory.tensors.keys():
        yield Defect(Code.WRONG_BASE, f"refit.json has fingerprints of other tensors than its base {base.id} has")


def content_faults(manifest: Manifest, delta: DeltaContents, base: Base) -> Iterator[Defect]:
    """What is wrong with what the delta's file holds. Pure."""
    if delta.fault is not None:
        yield Defect(Code.BAD_DELTA, f"{DELTA_NAME} cannot be used: {delta.fault}")
        return
    expected = version_id(manifest.run, manifest.order)
    if (delta.base, delta.version) != (base.id, expected):
        yield Defect(
            Code.WRONG_BASE,
            f"{DELTA_NAME} leads from {delta.base} to {delta.version}, and refit.json says {base.id} to {expected}",
        )
    for name, row in delta.rows.items():
        yield from _row_faults(name, row, manifest, base)
    for name, text in base.fingerprints.items() if manifest.fingerprints else ():
        if name not in delta.rows and manifest.fingerprints.get(name) != text:
            yield Defect(
                Code.WRONG_BASE, f"tensor {shown(name)} has another fingerprint than in {base.id}, and no changes"
            )
    known = {**base.fingerprints, **manifest.fingerprints, **{name: row.result for name, row in delta.rows.items()}}
    for copy, first in base.pairs.items():  # they were equal in the base: if neither has changed, they still are
        if delta.rows.keys() & {copy, first} and known.get(copy) != known.get(first):
            yield Defect(Code.NO_COPY, not_a_copy(copy, first))
    for name, count in list(delta.non_finite.items())[:_TENSORS_TOLD]:
        values = "1 new value that is" if count == 1 else f"{count} new values that are"
        text = f"tensor {shown(name)} has {values} NaN or infinite"
        text += ", or scales not above 0" * name.endswith(SCALES_END)
        yield Defect(Code.NON_FINITE, f"{text}: the trainer has diverged or wrote damage")


def _row_faults(name: str, row: TensorRecord, manifest: Manifest, base: Base) -> Iterator[Defect]:
    tensor = base.inventory.tensors.get(name)
    if tensor is None:
        yield Defect(Code.WRONG_BASE, f"it changes tensor {shown(name)}, which its base {base.id} does not have")
        return
    if not _fits(name, row, base):
        text = f"it changes tensor {shown(name)} as {row.dtype} {list(row.shape)}, and in {base.id} it is {tensor}"
        yield Defect(Code.WRONG_BASE, text)
    if base.fingerprints.get(name, row.base) != row.base:
        text = f"it was made from a tensor {shown(name)} with fingerprint {row.base}, and that of {base.id} has"
        yield Defect(Code.WRONG_BASE, f"{text} {base.fingerprints[name]}: {_ADVICE}")
    if manifest.fingerprints.get(name, row.result) != row.result:
        yield Defect(Code.BAD_DELTA, f"tensor {shown(name)} is to get another fingerprint than refit.json says")


def _fits(name: str, row: TensorRecord, base: Base) -> bool:
    tensor = base.inventory.tensors.get(name)
    return tensor is not None and (row.dtype, row.shape) == (tensor.dtype, tensor.shape)


def open_delta(folder: Folder, file: FileStat, base: Base) -> "DeltaReading":
    return DeltaReading(folder, file, base)


class DeltaReading:
    """A delta's file, read in two steps: its header, and its data, whose bytes come from those who digest them.

    The changes are not kept. Its data is searched only if its tensors are the base's.
    """

    def __init__(self, folder: Folder, file: FileStat, base: Base) -> None:
        """Read the header of a delta that should lead from `base`.

        Raises:
            ChangedError: it is not the file that was listed.
            OSError: it cannot be read.
        """
        self._folder, self._file = folder, file
        self._head: Head | None = None
        self._fault: str | None = None
        try:
            with folder.open(DELTA_NAME, file) as fd:
                self._head = DeltaFile(fd).head
        except DeltaRefusedError as error:
            self._fault = str(error)
        rows = dict[str, TensorRecord]() if self._head is None else self._head.rows
        is_fitting = all(_fits(*row, base) for row in rows.items())
        self._search = None if self._head is None or not is_fitting else ChangesSearch(self._head)

    @property
    def searches(self) -> Mapping[str, ChangesSearch]:
        """What all of the file is searched by, by its name, before `contents`."""
        return {} if self._search is None else {DELTA_NAME: self._search}

    def contents(self, stop: Event) -> DeltaContents:
        """What it holds. Reads it once more, tensor by tensor, where something is wrong with it.

        Raises:
            ChangedError: it is not the file that was listed.
            ReadingStoppedError: `stop` was set.
            OSError: it cannot be read.
        """
        if self._head is None:
            return DeltaContents(rows={}, non_finite={}, fault=self._fault)
        found: dict[str, int] = {}
        if self._search is not None and not self._search.is_sound:
            try:
                with self._folder.open(DELTA_NAME, self._file) as fd:
                    found = _nonfinite(DeltaFile(fd), stop)
                    check_unchanged(DELTA_NAME, fd, self._file)
            except DeltaRefusedError as error:
                return DeltaContents(rows={}, non_finite={}, fault=str(error))
        return DeltaContents(base=self._head.base, version=self._head.version, rows=self._head.rows, non_finite=found)


def _nonfinite(delta: DeltaFile, stop: Event) -> dict[str, int]:
    """Go through all indices and values, several tensors at a time; count the values that are not finite, by tensor."""
    found: dict[str, int] = {}

    def look(name: str, failed: Event) -> None:
        for _, values in delta.pieces(name):
            if stop.is_set():
                raise ReadingStoppedError
            if failed.is_set():
                return
            if any_nonfinite(kind := kind_of(name, delta.head.rows[name].dtype), bits := values.view("u1")):
                found[name] = found.get(name, 0) + count_nonfinite(kind, bits)

    longest_first = sorted(delta.head.rows, key=lambda name: -delta.head.rows[name].changed)
    in_lanes([partial(look, name) for name in longest_first], lanes=lanes_for(len(longest_first)))
    return {name: found[name] for name in delta.head.rows if name in found}
