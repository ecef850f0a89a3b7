"""What differs between two versions: by headers, fingerprints and a delta's own list; the values only where asked for.

Headers say which tensors there are, fingerprints which differ, and a delta how many elements of each. How far the
values moved, and without a delta how many did, has to be read from both versions' files: that is bounded, and ends when
the caller stops it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refitd.catalog.files import Files
from refitd.policy.chain import NoBase, chain_of
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.inventory import Tensor
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.checkpoint.strict_header import BITS
from refitd_client.contract.history import LayerChange, VersionsCompared
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.contract.states import Kind, VersionState
from refitd_client.delta import DeltaRefusedError
from refitd_client.delta.head import read_head
from refitd_client.files.plain_file import fill
from refitd_client.validation.validate import Structure

MOST_BYTES = 2**32  # of one version's tensors whose values are read
_CHUNK = 2**22  # bytes that are read at a time
_NAMED = 100
_LAYERS = 1000
_NUMBERED = re.compile(r".*?\.\d+(?=\.)")
_VIEWS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class NotComparableError(Exception):
    """Two versions cannot be compared, or not so far. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its record, what its own folder holds, and the tensors of the model that results."""

    record: VersionRecord
    seen: Structure
    tensors: Mapping[str, Tensor]

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """The tensors' fingerprints in its manifest; none where that has none."""
        return {} if self.seen.manifest is None else self.seen.manifest.fingerprints


class ValuesRead(NamedTuple):
    """Of a tensor: the squared norms of the first version and of the difference, and how many elements differ."""

    own: float
    moved: float
    changed: int


_NOT_READ = ValuesRead(0.0, 0.0, 0)


@dataclass(slots=True)
class _Sums:
    """What is summed up of one layer. `squares` are of the first version, of the difference."""

    tensors: int = 0
    elements: int = 0
    differing: int = 0
    changed: int = 0
    squares: tuple[float, float] = field(default=(0.0, 0.0))


async def side_of(record: VersionRecord, files: Files, versions: Mapping[str, VersionRecord]) -> Side:
    """Read a version's manifest and headers, and for a delta those of the full version beneath it.

    Raises:
        NotComparableError: its files are gone, not there yet, or not as they should be.
    """
    if record.state in {VersionState.RETIRED, VersionState.DELETED}:
        raise NotComparableError(f"the files of {record.id} were deleted: pin versions that you want to compare")
    chain = chain_of(record, versions)
    if isinstance(chain, NoBase):
        raise NotComparableError(f"{record.id} cannot be read: {chain.reason}")
    try:
        seen = await files.structure(record.path)
        beneath = seen if chain[0] is record else await files.structure(chain[0].path)
    except OSError as error:
        raise NotComparableError(f"the files of {record.id} cannot be read now: {error}") from error
    for structure in (seen, beneath):
        if structure.reason is not None:
            raise NotComparableError(f"{structure.path} is not complete: {structure.reason}")
    return Side(record, seen, beneath.inventory.tensors)


def changed_elements(root: Path, first: Side, second: Side) -> Mapping[str, int] | None:
    """How many elements of each tensor differ, where one of the two is a delta on the other; None elsewhere. Blocks.

    Raises:
        NotComparableError: the delta cannot be read.
    """
    pairs = ((first.record, second), (second.record, first))
    delta = next((d for b, d in pairs if d.record.kind is Kind.DELTA and d.record.base == b.id), None)
    if delta is None:
        return None
    try:
        with Folder(root, delta.record.path) as folder, folder.open(DELTA_NAME, delta.seen.files[DELTA_NAME]) as fd:
            return {name: row.changed for name, row in read_head(fd).rows.items()}
    except (OSError, KeyError, DeltaRefusedError, ChangedError, OpeningRefusedError) as error:
        raise NotComparableError(f"the changes of {delta.record.id} cannot be read: {error}") from error


def compared(
    first: Side,
    second: Side,
    changed: Mapping[str, int] | None,
    values: Mapping[str, ValuesRead] | None = None,
) -> VersionsCompared:
    """Compare two versions. Pure.

    Args:
        first: the earlier one.
        second: the later one.
        changed: elements that differ by tensor, None if that is not known without the values.
        values: what was read of each tensor, if that was asked for.
    """
    mine, theirs = first.tensors, second.tensors
    common = [name for name in mine if name in theirs and mine[name].shape == theirs[name].shape]
    fingerprinted = bool(first.fingerprints) and bool(second.fingerprints)
    if changed is None and values is not None and all(name in values for name in common):
        changed = {name: values[name].changed for name in common}
    knows_tensors = fingerprinted or changed is not None
    layers: defaultdict[str, _Sums] = defaultdict(_Sums)
    for name in common:
        sums = layers[_layer_of(name)]
        sums.tensors += 1
        sums.elements += math.prod(mine[name].shape)
        elements = 0 if changed is None else changed.get(name, 0)
        sums.changed += elements
        sums.differing += (
            first.fingerprints.get(name) != second.fingerprints.get(name) if fingerprinted else elements > 0
        )
        read = _NOT_READ if values is None else values.get(name, _NOT_READ)
        sums.squares = (sums.squares[0] + read.own, sums.squares[1] + read.moved)
    elements = sum(sums.elements for sums in layers.values())
    reshaped = [name for name in mine if name in theirs and str(mine[name]) != str(theirs[name])]
    whole = [math.fsum(sums.squares[i] for sums in layers.values()) for i in (0, 1)]
    return VersionsCompared(
        first=first.record.id,
        second=second.record.id,
        tensors=(len(mine), len(theirs)),
        bytes=(first.record.bytes, second.record.bytes),
        added=[name for name in theirs if name not in mine][:_NAMED],
        removed=[name for name in mine if name not in theirs][:_NAMED],
        reshaped=[f"{name}: {mine[name]} became {theirs[name]}" for name in reshaped[:_NAMED]],
        layers=[
            LayerChange(
                layer=layer,
                tensors=sums.tensors,
                elements=sums.elements,
                changed_tensors=sums.differing if knows_tensors else None,
                changed=None if changed is None else sums.changed,
                norm=None if values is None else _root(sums.squares[0]),
                distance=None if values is None else _root(sums.squares[1]),
            )
            for layer, sums in list(layers.items())[:_LAYERS]
        ],
        changed_tensors=sum(sums.differing for sums in layers.values()) if knows_tensors else None,
        density=None if changed is None else sum(changed.values()) / max(1, elements),
        norm=None if values is None else _root(whole[0]),
        distance=None if values is None else _root(whole[1]),
        notes=list(
            _notes(first, second, len(layers), common if values is not None else (), knows_tensors=knows_tensors)
        ),
    )


def _layer_of(name: str) -> str:
    """The module with the first number in a tensor's name, such as `model.layers.3`; else the module that has it."""
    numbered = _NUMBERED.match(name)
    return name.rpartition(".")[0] or name if numbered is None else numbered[0]


def _root(square: float) -> float | None:
    return math.sqrt(square) if math.isfinite(square) else None


def _notes(first: Side, second: Side, layers: int, read: Collection[str], *, knows_tensors: bool) -> Iterator[str]:
    if not knows_tensors:
        yield "which tensors differ is not known: not both manifests have fingerprints"
    if layers > _LAYERS:
        yield f"of {layers} layers the first {_LAYERS} are listed"
    odd = sorted({first.tensors[name].dtype for name in read if not _is_read(first, second, name)})
    if odd:
        yield f"tensors of another dtype than before, or of dtype {', '.join(odd)}, are left out of the norms"


def _is_read(first: Side, second: Side, name: str) -> bool:
    dtype = first.tensors[name].dtype
    return second.tensors[name].dtype == dtype and (dtype == "BF16" or dtype in _VIEWS)


def read_values(root: Path, first: Side, second: Side, stop: Event) -> dict[str, ValuesRead]:
    """What the values of the tensors of both versions say. Blocks until all is read.

    Args:
        root: the root.
        first: the earlier version.
        second: the later one.
        stop: ends the reading when it is set; what is returned then is not complete.

    Raises:
        NotComparableError: a version is a delta or too large, or its files change meanwhile.
    """
    for side in (first, second):
        if side.record.kind is Kind.DELTA:
            raise NotComparableError(f"{side.record.id} is a delta: the values of two full versions can be compared")
    common = (name for name in first.tensors if name in second.tensors)
    names = [name for name in common if first.tensors[name].shape == second.tensors[name].shape]
    names = [name for name in names if _is_read(first, second, name)]
    size = sum(_nbytes(first.tensors[name]) for name in names)
    if size > MOST_BYTES:
        raise NotComparableError(
            f"the tensors take {size:,} bytes, and at most {MOST_BYTES:,} of a version are read: compare without norms"
        )
    try:
        with Folder(root, first.record.path) as mine, Folder(root, second.record.path) as theirs:
            found = {name: _read(mine, theirs, first, second, name, stop) for name in names if not stop.is_set()}
            changed = [
                side.record.id
                for folder, side in ((mine, first), (theirs, second))
                if folder.signature(folder.list()) != side.seen.signature
            ]
    except (OSError, ChangedError, OpeningRefusedError) as error:
        raise NotComparableError(f"{error}: compare again") from error
    if changed:
        raise NotComparableError(f"the files of {changed[0]} changed while they were read: compare again")
    return found


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * BITS[tensor.dtype] // 8


def _read(mine: Folder, theirs: Folder, first: Side, second: Side, name: str, stop: Event) -> ValuesRead:
    file, other = first.tensors[name].file or "", second.tensors[name].file or ""
    header, other_header = first.seen.headers[file], second.seen.headers[other]
    begin = header.data_start + header.tensors[name].start
    other_begin = other_header.data_start + other_header.tensors[name].start
    size, dtype = _nbytes(first.tensors[name]), first.tensors[name].dtype
    own, moved, changed = 0.0, 0.0, 0
    with mine.open(file, first.seen.files[file]) as fd, theirs.open(other, second.seen.files[other]) as other_fd:
        for at in range(0, size, _CHUNK):
            if stop.is_set():
                break
            before = _floats(fd, begin + at, min(_CHUNK, size - at), dtype)
            after = _floats(other_fd, other_begin + at, min(_CHUNK, size - at), dtype)
            with np.errstate(all="ignore"):  # what is not finite in the end has no norm
                own += float(np.vdot(before, before))
                after -= before
                moved += float(np.vdot(after, after))
            changed += int(np.count_nonzero(after))
    return ValuesRead(own, moved, changed)


def _floats(fd: int, offset: int, length: int, dtype: str) -> NDArray[Any]:
    """Values of a tensor as 32-bit floats, which hold them all but those of 64 bits."""
    data = np.empty(length, np.uint8)
    fill(fd, data.data, offset)
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view(_VIEWS[dtype]).astype(np.float64 if dtype == "F64" else np.float32)
