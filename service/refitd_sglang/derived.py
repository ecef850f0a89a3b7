"""What follows from a load plan: where elements go, what is fingerprinted, and the moves for files of one layout.

All of it is the same for every version, as long as the plan is.
"""

from collections.abc import Mapping
from functools import cached_property

import torch

from refitd.catalog.header import Header
from refitd.catalog.inventory import Tensor
from refitd_sglang.contents import Prints, holders_of
from refitd_sglang.devices import span_of
from refitd_sglang.laid import Placed, Ways
from refitd_sglang.overlap import Overlap, parts_of
from refitd_sglang.plan import Plan
from refitd_sglang.road import Table, Watch, table_of
from refitd_sglang.routes import Routes, routes_of
from refitd_sglang.source import Source


class Derived:
    """Of one plan, by any version of its inventory."""

    def __init__(self, plan: Plan, model: torch.nn.Module, source: Source) -> None:
        """Nothing is computed before it is asked for."""
        self.plan = plan
        self._model = model
        self._tensors: Mapping[str, Tensor] = source.structure.inventory.tensors
        self._bytes = {
            name: spec.end - spec.start
            for header in source.structure.headers.values()
            for name, spec in header.tensors.items()
        }
        self._table: tuple[Table, Watch | None] | None = None

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
    def ways(self) -> Ways:
        """The same of all tensors, for changes to be laid out by."""
        found: dict[str, Placed] = {}
        for name, tensor in self._tensors.items():
            others = () if name in self.plan.unused else "it goes through the loader, which computes"
            found[name] = Placed(tensor.dtype, tensor.shape, self.routes.get(name, others))
        return found

    @cached_property
    def prints(self) -> Prints:
        """The checkpoint's tensors that lie whole in the model."""
        return Prints(self._whole(), self._model)

    def table_of(self, headers: Mapping[str, Header]) -> tuple[Table, Watch | None]:
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
            way = self.routes[copy.name]
            if not isinstance(way, str) and way[number].whole:
                found.append((copy.name, copy.target))
        return found

    def _watch(self, table: Table) -> Watch | None:
        """Only where copies are all that is done: what a loader computes comes after them."""
        if self.plan.residual or not self.plan.proven:
            return None
        watched = [*self.holders.values(), *self.prints.others]
        spans = [span_of(tensor) for tensor in watched]
        return Watch(Overlap(parts_of(table.writes, spans), watched), list(self.holders))
