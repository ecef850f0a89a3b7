"""What the index and the headers of a checkpoint say together, worked out once for each layout. Pure.

Every version of a run repeats the layout of the one before. `read_header` and `parse_index` return the same objects for
the same bytes, and what follows from them alone is kept here: for a model of 100,000 tensors it takes a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from refitd_client.checkpoint.fault import Defect
from refitd_client.checkpoint.index import Index, check_index
from refitd_client.checkpoint.inventory import Inventory, duplicates, inventory_of
from refitd_client.checkpoint.strict_header import BoundedCache, Header
from refitd_client.contract.manifest import TensorsSummary

MOST_OF_A_KIND = 3  # faults: one tensor in the wrong place often means all of them
_REMEMBERED_LAYOUTS = 16  # layouts: of each a service needs one for a run's full versions
_REMEMBERED_TENSORS = 500_000  # in all of them; one takes up to 200 bytes


@dataclass(frozen=True)
class CheckpointLayout:
    """The headers of a checkpoint's weight files, and its index where it has one."""

    headers: Mapping[str, Header]
    index: Index | None

    @cached_property
    def inventory(self) -> Inventory:
        """The tensors."""
        return inventory_of(self.headers)

    @cached_property
    def summary(self) -> TensorsSummary:
        """How many tensors, their bytes and their dtypes."""
        specs = (spec for header in self.headers.values() for spec in header.tensors.values())
        return TensorsSummary.of((spec.dtype, spec.end - spec.start) for spec in specs)

    @cached_property
    def duplicates(self) -> list[Defect]:
        """Tensors that two files hold, the first few."""
        return list(islice(duplicates(self.headers), MOST_OF_A_KIND))

    @cached_property
    def disagreements(self) -> list[Defect]:
        """How the index and the headers differ, the first few."""
        named = {name: header.tensors for name, header in self.headers.items()}
        return [] if self.index is None else list(islice(check_index(self.index, named), MOST_OF_A_KIND))

    def is_of(self, headers: Mapping[str, Header], index: Index | None) -> bool:
        """Whether it was worked out of these very objects."""
        same_names = list(self.headers) == list(headers)
        return same_names and self.index is index and all(self.headers[name] is headers[name] for name in headers)


_known: BoundedCache[tuple[object, ...], CheckpointLayout] = BoundedCache(_REMEMBERED_LAYOUTS, _REMEMBERED_TENSORS)


def layout_of(headers: Mapping[str, Header], index: Index | None) -> CheckpointLayout:
    """The layout of some headers and an index; the one that was worked out before, where these are the same objects."""
    key = id(index), *map(id, headers.values())
    known = _known.get(key)
    if known is None or not known.is_of(headers, index):  # an id alone may be another object's by now
        known = CheckpointLayout(dict(headers), index)
        _known.put(key, known, sum(len(header.tensors) for header in headers.values()))
    return known
