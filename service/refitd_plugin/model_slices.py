"""The slices of checkpoint tensors that lie in one rank's model, and what they add to the tensors' fingerprints.

A tensor that lies whole in the model is fingerprinted as one (`contents.TensorFingerprints`). All else that is copied
into it is a slice here, also a tensor that is transposed or split on a rank by itself: `slices` adds them up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from refitd_client.checkpoint.inventory import Tensor
from refitd_client.fingerprint.host import MASK, width_of
from refitd_client.fingerprint.parts import ElementRows, PartInput, part_scans
from refitd_client.fingerprint.strips import MemoryStrip, StripScan
from refitd_client.fingerprint.tensors import has_triton
from refitd_client.fingerprint.torch_ops import flat_bits
from refitd_plugin.engine_slices import SliceCheck
from refitd_plugin.layout import BEGIN, HOLDER, NUMBER, LaidOutDelta, Route, Routes
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.slices import RankSlices, SliceSums, Sums, slice_line


class ModelSlices:
    """See the module. `mine` are they, `names` the checkpoint's tensors by the numbers that these give, and `elements`
    how many each of them has.
    """

    def __init__(
        self, plan: ReplayPlan, routes: Routes, tensors: Mapping[str, Tensor], nbytes: Mapping[str, int], holders: Any
    ) -> None:
        """Look at a plan.

        Args:
            plan: the rank's.
            routes: of its copies.
            tensors: the checkpoint's, by name.
            nbytes: the bytes of each.
            holders: the model's tensors by the numbers that routes give.
        """
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
        table = np.array(lines, dtype=np.int64).reshape(-1, 5)
        self.mine = RankSlices(table, plan.inventory)
        self._scan = SliceScan(taken, holders)

    def take(self) -> SliceSums:
        """What they add to fingerprints now."""
        return SliceSums(self.mine, self._scan.take())

    def check(self, found: SliceSums | None, expected: Mapping[str, str], says: str) -> SliceCheck:
        """What was found in them, to be held against a manifest together with what other ranks have.

        Args:
            found: what they add; None to look now.
            expected: the manifest's fingerprints, by name.
            says: what the manifest is.
        """
        found = self.take() if found is None else found
        return SliceCheck(found=found, names=self.names, elements=self.elements, expected=expected, says=says)

    def shifted(self, before: SliceSums | None, laid: LaidOutDelta, shifts: Sequence[int]) -> SliceSums | None:
        """What they add after a delta; None where that is not known, as what they added before.

        Args:
            before: what they added before.
            laid: the delta.
            shifts: what each of its pieces adds.
        """
        if before is None or before.slices.digest != self.mine.digest:
            return None
        sums = before.sums.tolist()
        for group in laid.groups:
            for row in group.table.tolist():
                piece = int(row[NUMBER])
                number = self._numbers.get((laid.names[piece], row[HOLDER], row[BEGIN]))
                if number is not None:
                    sums[number] = sums[number] + shifts[piece] & MASK
        return SliceSums(self.mine, np.array(sums, dtype=np.uint64))


class SliceScan:
    """Looks at slices in a model, again and again. On a GPU in one launch, by a list of addresses that is kept."""

    def __init__(self, routes: Sequence[Route], holders: Sequence[torch.Tensor]) -> None:
        """The tensors of `holders` stay where they are. Waits for the GPU's current stream where they are on one."""
        self._views = [(_view_of(holders[route.holder], route), _rows_of(route)) for route in routes]
        devices = {view.device for view, _ in self._views}
        self._strips: StripScan | None = None
        if len(devices) == 1 and has_triton() and (device := devices.pop()).type == "cuda":
            self._strips = StripScan([_strip_of(*each) for each in self._views], device)

    def take(self) -> Sums:
        """What they add. Waits for the GPU."""
        if self._strips is not None:
            return np.array([found.fingerprint for found in self._strips.begin()()], dtype=np.uint64)
        found = [part_scans([PartInput(flat_bits(view), [rows])])[0].fingerprint for view, rows in self._views]
        return np.array(found, dtype=np.uint64)


def _view_of(holder: torch.Tensor, route: Route) -> torch.Tensor:
    """What a route fills, as a matrix in the order of the checkpoint's tensor."""
    shape, strides = (route.rows, route.columns), (route.row_place, route.column_place)
    return holder.detach().as_strided(shape, strides, holder.storage_offset() + route.begin)


def _rows_of(route: Route) -> ElementRows:
    return ElementRows(route.offset, route.columns, route.rows, route.row_index)


def _strip_of(view: torch.Tensor, rows: ElementRows) -> MemoryStrip:
    row_place, column_place = view.stride()
    return MemoryStrip(view.data_ptr(), view.element_size(), rows, row_place, column_place)
