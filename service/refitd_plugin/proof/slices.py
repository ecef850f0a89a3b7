"""Which elements of the checkpoint's tensors lie in which rank's model, and whether together they are what a manifest
says.

A fingerprint is a sum over a tensor's elements with their places in it, so what the ranks find in their slices adds up
to the manifest's. A slice is a line of a table:

    tensor  begin  width  rows  pitch        `rows` rows of `width` elements from flat index `begin` of a tensor on, the
                                             rows `pitch` apart; `tensor` is its place among the names in order

Ranks with the same slice have replicas: each has to find the same in it, and it is added once. Where the different
slices of a tensor have each of its elements once, the tensor is `tiled`, and found right or wrong. Of any other tensor
nothing is said. Tensors that lie whole in a rank's model are in no table: each rank finds out about these by itself.

A rank's report after a load has the table of its slices, and what they add to fingerprints. `EngineTable` decides,
pure. A rank that cannot read what another one reports says that the version is wrong: so whichever rank decides first,
no version is kept that some of them found wrong.

A tensor that lies whole in the model is fingerprinted as one
(`contents.TensorFingerprints`). All else that is copied into it is a slice here, also a tensor that is transposed or
split on a rank by itself.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from zlib import compress, decompress

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.checkpoint.inventory import Tensor
from refitd_client.fingerprint.batch import MemoryStrip, StripScan
from refitd_client.fingerprint.device import flat_bits
from refitd_client.fingerprint.host import MASK, width_of
from refitd_client.fingerprint.tensors import ElementRows, PartInput, has_triton, part_scans
from refitd_client.transport.schedule import common, strip
from refitd_plugin.delta.layout import BEGIN as ROUTE_BEGIN
from refitd_plugin.delta.layout import HOLDER, NUMBER, LaidOutDelta, Route, Routes
from refitd_plugin.update.plan import ReplayPlan
from refitd_plugin.update.ranks import RankState, Reports

TENSOR, BEGIN, WIDTH, ROWS, PITCH = range(5)
_COLUMNS = 5

Table = NDArray[np.int64]
Sums = NDArray[np.uint64]


def slice_line(tensor: int, begin: int, width: int, rows: int, pitch: int) -> tuple[int, int, int, int, int]:
    """A line of a table, the same for the same elements: rows that follow each other without a gap are one."""
    if rows == 1 or pitch == width:
        return tensor, begin, width * rows, 1, 0
    return tensor, begin, width, rows, pitch


def encode_table(table: Table) -> str:
    return b64encode(compress(table.astype("<i8").tobytes(), 1)).decode()


def decode_table(text: str) -> Table:
    """Raises ValueError where a text is not one of a table."""
    try:
        return np.frombuffer(decompress(b64decode(text, validate=True)), "<i8").astype(np.int64).reshape(-1, _COLUMNS)
    except Exception as error:
        raise ValueError(f"no slices: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class SliceSums:
    """What a rank's slices add to the fingerprints of their tensors, in the order of the table, which is encoded."""

    table: str
    sums: Sums


def encode_sums(sums: Sums) -> str:
    """The sums as text for other ranks: 11 characters each."""
    return b64encode(sums.astype("<u8").tobytes()).decode()


def decode_sums(text: str) -> Sums:
    """Raises ValueError where a text is not one of sums."""
    return np.frombuffer(b64decode(text, validate=True), "<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class SliceVerdict:
    """What the ranks together found: a sentence about the first tensor that is wrong, and those that are proved."""

    fault: str = ""
    proved: frozenset[str] = frozenset()


class EngineTable:
    """The slices of all ranks of an engine, in the order in which their sums are given.

    Made once for the load plans of all ranks, of which each version's sums are judged.
    """

    def __init__(self, tables: Sequence[Table], elements: Sequence[int]) -> None:
        """`elements` says how many each tensor has, by its number."""
        self._counts = [len(each) for each in tables]
        lines = np.concatenate(tables)
        self._order = np.lexsort(lines.T[::-1])
        lines = lines[self._order]
        is_first = _differ(lines)
        self._group = np.cumsum(is_first) - 1  # of each line in order: which of the different slices it is
        self._firsts = np.flatnonzero(is_first)
        lines = lines[self._firsts]
        self._begins = np.flatnonzero(_differ(lines[:, :1]))
        self.tensors = lines[self._begins, TENSOR]
        self._tensor_of = np.cumsum(_differ(lines[:, :1])) - 1  # of each different slice
        ends = [*self._begins[1:].tolist(), len(lines)][: len(self._begins)]
        known: dict[tuple[bytes, int], bool] = {}
        tiled: list[bool] = []
        for tensor, begin, end in zip(self.tensors.tolist(), self._begins.tolist(), ends, strict=True):
            strips = lines[begin:end, BEGIN:]
            key = strips.tobytes(), elements[tensor]
            if key not in known:
                known[key] = tiles(strips, elements[tensor])
            tiled.append(known[key])
        self.tiled = np.array(tiled, dtype=bool)

    def verdict(
        self, sums: Sequence[Sums], names: Sequence[str], expected: Mapping[str, str], says: str
    ) -> SliceVerdict:
        """Hold what the ranks found against the fingerprints that are `expected`, as hex digits by name; of other
        tensors nothing is said. `says`: what has them. Raises ValueError: there are not as many sums as slices.
        """
        if [len(each) for each in sums] != self._counts:
            raise ValueError("not each slice has a sum")
        if not len(self.tensors):
            return SliceVerdict()
        found = np.concatenate(sums)[self._order]
        once = found[self._firsts]
        is_other = np.zeros(len(self.tensors), dtype=bool)
        is_other[self._tensor_of[self._group[found != once[self._group]]]] = True
        totals = np.add.reduceat(once, self._begins)
        proved: list[str] = []
        for number in np.flatnonzero(self.tiled).tolist():
            name = names[int(self.tensors[number])]
            if name not in expected:
                continue
            if is_other[number]:
                return SliceVerdict(f"ranks that have the same slice of tensor {name} have different values in memory")
            if int(totals[number]) != int(expected[name], 16):
                return SliceVerdict(
                    f"the ranks' slices of tensor {name} have fingerprint {int(totals[number]):016x} in memory, "
                    f"and {says} says {expected[name]}"
                )
            proved.append(name)
        return SliceVerdict(proved=frozenset(proved))


def _differ(lines: Table) -> NDArray[np.bool_]:
    """Whether each line differs from the one before."""
    found = np.ones(len(lines), dtype=bool)
    if len(lines):
        found[1:] = (lines[1:] != lines[:-1]).any(axis=1)
    return found


def tiles(lines: Table, elements: int) -> bool:
    """Whether different slices of a tensor have each of its elements once. `lines`: of a table, without the tensor."""
    strips = [strip(*line) for line in lines.tolist()]
    if sum(each.nbytes for each in strips) != elements or max(each.end for each in strips) > elements:
        return False
    return not any(common(one, other) for one, other in combinations(strips, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCheck:
    """What a rank found in its slices after a load, and what that is to be held against: the fingerprints that are
    `expected`, as hex digits by name, of which the manifest (`says`) speaks. `names` and `elements` are those of the
    tensors, by the numbers of the table.
    """

    found: SliceSums
    names: Sequence[str]
    elements: Sequence[int]
    expected: Mapping[str, str]
    says: str


class EngineSlices:
    """What the ranks of one engine found, as seen by one of them. A load plan gives each report the same table."""

    def __init__(self) -> None:
        self._known: tuple[list[str], EngineTable] | None = None

    def verdict(self, reports: Reports, check: SliceCheck | None) -> SliceVerdict:
        """What the ranks found together, where all have written. `check`: what this rank found; None where it does not
        know its slices.
        """
        present = [each for each in reports if each is not None and each.state is RankState.WRITTEN and each.slices]
        if check is None or len(present) < len(reports):
            return SliceVerdict()  # either nothing is known of some slices, or the version is not kept anyway
        try:
            encoded = [each.slices for each in present]
            if self._known is None or self._known[0] != encoded:
                self._known = encoded, EngineTable([decode_table(each) for each in encoded], check.elements)
            sums = [decode_sums(each.sums) for each in present]
            return self._known[1].verdict(sums, check.names, check.expected, check.says)
        except ValueError as error:
            return SliceVerdict(f"what the ranks found in their slices of tensors cannot be read: {error}")


class ModelSlices:
    """The slices of one rank's model. `table` is theirs, encoded. `names` are the checkpoint's tensors by the numbers
    that it gives, and `elements` how many each has.
    """

    def __init__(
        self, plan: ReplayPlan, routes: Routes, tensors: Mapping[str, Tensor], nbytes: Mapping[str, int], holders: Any
    ) -> None:
        """Look at a plan. `routes`: of its copies. `holders`: the model's tensors by the numbers that routes give."""
        self.names = sorted(tensors)
        self.elements = [nbytes[name] // width_of(tensors[name].dtype) for name in self.names]
        loaded = {copy.name for copy in plan.copies if copy.target.numel()}
        lines, taken = list[tuple[int, ...]](), list[Route]()
        self._numbers: dict[tuple[str, int, int], int] = {}
        for number, name in enumerate(self.names):
            found = routes.get(name, "") if name in loaded else ()
            if name in plan.residual or isinstance(found, str):
                continue
            for route in found:
                if not route.whole:
                    self._numbers[name, route.holder, route.begin] = len(lines)
                    lines.append(slice_line(number, route.offset, route.columns, route.rows, route.row_index))
                    taken.append(route)
        self.table = encode_table(np.array(lines, dtype=np.int64).reshape(-1, _COLUMNS))
        self._scan = SliceScan(taken, holders)

    def take(self) -> SliceSums:
        return SliceSums(self.table, self._scan.take())

    def check(self, found: SliceSums | None, expected: Mapping[str, str], says: str) -> SliceCheck:
        """What was `found` in them, or is now, to be held against a manifest together with what other ranks have."""
        found = self.take() if found is None else found
        return SliceCheck(found=found, names=self.names, elements=self.elements, expected=expected, says=says)

    def shifted(self, before: SliceSums | None, laid: LaidOutDelta, shifts: Sequence[int]) -> SliceSums | None:
        """What they add after a delta; None where that is not known, as what they added before. `shifts`: what each of
        its pieces adds.
        """
        if before is None or before.table != self.table:
            return None
        sums = before.sums.tolist()
        for group in laid.groups:
            for row in group.table.tolist():
                piece = int(row[NUMBER])
                number = self._numbers.get((laid.names[piece], row[HOLDER], row[ROUTE_BEGIN]))
                if number is not None:
                    sums[number] = sums[number] + shifts[piece] & MASK
        return SliceSums(self.table, np.array(sums, dtype=np.uint64))


class SliceScan:
    """Looks at slices in a model, again and again. On a GPU in one launch, by a list of addresses that is kept."""

    def __init__(self, routes: Sequence[Route], holders: Sequence[torch.Tensor]) -> None:
        """The tensors of `holders` stay where they are. Waits for the GPU's current stream where they are on one."""
        self._views = [_view_of(holders[route.holder], route) for route in routes]
        devices = {view.device for view, _ in self._views}
        self._strips: StripScan | None = None
        if len(devices) == 1 and has_triton() and (device := devices.pop()).type == "cuda":
            self._strips = StripScan([_strip_of(*each) for each in self._views], device)

    def take(self) -> Sums:
        if self._strips is not None:
            return np.array([found.fingerprint for found in self._strips.begin()()], dtype=np.uint64)
        found = [part_scans([PartInput(flat_bits(view), [rows])])[0].fingerprint for view, rows in self._views]
        return np.array(found, dtype=np.uint64)


def _view_of(holder: torch.Tensor, route: Route) -> tuple[torch.Tensor, ElementRows]:
    """What a route fills, as a matrix in the order of the checkpoint's tensor, and where that lies in it."""
    shape, strides = (route.rows, route.columns), (route.row_place, route.column_place)
    view = holder.detach().as_strided(shape, strides, holder.storage_offset() + route.begin)
    return view, ElementRows(route.offset, route.columns, route.rows, route.row_index)


def _strip_of(view: torch.Tensor, rows: ElementRows) -> MemoryStrip:
    row_place, column_place = view.stride()
    return MemoryStrip(view.data_ptr(), view.element_size(), rows, row_place, column_place)
