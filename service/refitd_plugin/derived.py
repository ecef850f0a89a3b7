"""What follows from a load plan: where elements go, what is fingerprinted, and the moves for files of one layout.

All of it is the same for every version, as long as the plan is.
"""

from collections.abc import Mapping
from functools import cached_property

import torch

from refitd_client.checkpoint.inventory import Tensor
from refitd_client.checkpoint.strict_header import Header
from refitd_plugin.contents import Prints, holders_of
from refitd_plugin.copy_schedule import CopyWatch, MoveTable, table_of
from refitd_plugin.devices import span_of
from refitd_plugin.layout import PlacedTensor, Placements
from refitd_plugin.overlap import Overlap, parts_of
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.routes import Routes, routes_of
from refitd_plugin.source import VersionSource


class Derived:
    """Of one plan, by any version of its inventory."""

    def __init__(self, plan: ReplayPlan, model: torch.nn.Module, source: VersionSource) -> None:
        """Nothing is computed before it is asked for."""
        self.plan = plan
        self._model = model
        self._tensors: Mapping[str, Tensor] = source.structure.inventory.tensors
        self._bytes = {
            name: spec.end - spec.start
            for header in source.structure.headers.values()
            for name, spec in header.tensors.items()
        }
        self._table: tuple[MoveTable, CopyWatch | None] | None = None

    @cached_property
    def holders(self) -> dict[str, torch.Tensor]:
        """The model's tensors, by the numbers that routes give."""
        return holders_of(self._model)

    @cached_property
    def routes(self) -> Routes:
        """Where the elements of the checkpoint's tensors go."""
        copies = self.plan.copies
        elements = {copy.name: self._bytes[copy.name] // copy.target.element_size() for copy in copies}
        return routes_of(copies, elements, list(self.holders.values()))

    @cached_property
    def placements(self) -> Placements:
        """The same of all tensors, for changes to be laid out by."""
        found: dict[str, PlacedTensor] = {}
        for name, tensor in self._tensors.items():
            others = () if name in self.plan.unused else "it goes through the loader, which computes"
            found[name] = PlacedTensor(tensor.dtype, tensor.shape, self.routes.get(name, others))
        return found

    @cached_property
    def prints(self) -> Prints:
        """The checkpoint's tensors that lie whole in the model."""
        return Prints(self._whole(), self._model)

    def table_of(self, headers: Mapping[str, Header]) -> tuple[MoveTable, CopyWatch | None]:
        """The moves from files with these headers, and what is watched beside them. Known as long as they are alike."""
        if self._table is None or self._table[0].headers != headers:
            table = table_of(self.plan.copies, headers)
            self._table = table, self._watch(table)
        return self._table

    def _whole(self) -> list[tuple[str, torch.Tensor]]:
        seen: dict[str, int] = {}
        found: list[tuple[str, torch.Tensor]] = []
        for copy in self.plan.copies:
            number = seen[copy.name] = seen.get(copy.name, -1) + 1
            routes = self.routes[copy.name]
            if not isinstance(routes, str) and routes[number].whole:
                found.append((copy.name, copy.target))
        return found

    def _watch(self, table: MoveTable) -> CopyWatch | None:
        """Only where copies are all that is done: what a loader computes comes after them."""
        if self.plan.residual or not self.plan.proven:
            return None
        watched = [*self.holders.values(), *self.prints.others]
        spans = [span_of(tensor) for tensor in watched]
        return CopyWatch(Overlap(parts_of(table.writes, spans), watched), list(self.holders))
