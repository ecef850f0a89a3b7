"""What each rank sends of a version, and how its tensors are gone through and scanned, part by part.

A rank sends the parts that it would write (`layout.py`), one after the other. The parts of all ranks have each byte of
the version once, whichever ranks hold it, and share the work out.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from refitd_client.checkpoint.finite import NO_RULE, Rule, rule_of
from refitd_client.checkpoint.header import Entry
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import Scan, width_of
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import ElementRows, PartInput, has_triton, part_scans
from refitd_client.sharded.holdings import Holding, flat_of
from refitd_client.sharded.layout import Box, Claim, ShardedLayout, WritePart, runs
from refitd_client.tensors import entry_of
from refitd_client.transport.offer import side_by_side
from refitd_client.transport.schedule import HeldStrip, Strip, joined
from refitd_client.write.plan import not_finite

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import MemoryStrip, StripScan


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """A part of one tensor: elements of a rank's box, which lie at byte `at` of what it sends.

    `item` is the bytes of an element, as torch counts elements; `strips` are the bytes of the tensor that it has.
    """

    part: WritePart
    entry: Entry
    item: int
    at: int
    strips: tuple[Strip, ...]

    @property
    def nbytes(self) -> int:
        return (self.part.end - self.part.begin) * self.item

    def rows(self, width: int) -> list[ElementRows]:
        """The same in elements of `width` bytes, as fingerprints count them."""
        return [
            ElementRows(each.begin // width, each.width // width, each.rows, each.pitch // width)
            for each in self.strips
        ]


def sent_parts(parts: Sequence[WritePart], claims: Sequence[Claim]) -> tuple[list[SentPart], int]:
    """What one rank sends, and how many bytes of memory that takes."""
    by_name = {claim.name: claim for claim in claims}
    found: list[SentPart] = []
    for part in parts:
        claim = by_name[part.name]
        entry = entry_of(claim.name, claim.dtype, claim.shape)
        item = entry.nbytes // prod(claim.shape)
        lengths = ((run.at * item, (run.end - run.begin) * item) for run in runs(
            claim.boxes[part.box], claim.shape, part.begin, part.end))  # fmt: skip
        found.append(SentPart(part=part, entry=entry, item=item, at=0, strips=tuple(joined(lengths))))
    places, nbytes = side_by_side(each.nbytes for each in found)
    placed = [
        SentPart(part=each.part, entry=each.entry, item=each.item, at=at, strips=each.strips)
        for each, at in zip(found, places, strict=True)
    ]
    return placed, nbytes


def held_strips(parts: Sequence[SentPart], numbers: dict[str, int]) -> list[HeldStrip]:
    """What one rank sends, for the schedule. `numbers` are the tensors' by name."""
    found: list[HeldStrip] = []
    for each in parts:
        at = each.at
        for strip in each.strips:
            found.append(HeldStrip(numbers[each.entry.name], strip, at))
            at += strip.nbytes
    return found


def held_by_name(parts: Sequence[SentPart]) -> dict[str, list[HeldStrip]]:
    """The same by the tensors' names, which count as number 0."""
    found: dict[str, list[HeldStrip]] = {}
    for each in parts:
        found.setdefault(each.entry.name, []).extend(held_strips([each], {each.entry.name: 0}))
    return found


def entries_of(layout: ShardedLayout) -> list[Entry]:
    """The version's tensors, as they lie in its files."""
    return [entry for shard in layout.shards.shards for entry in shard.entries]


Part = TypeVar("Part")


def each_part(
    holdings: Mapping[str, Holding],
    parts: Mapping[str, Sequence[Part]],
    do: Callable[[Holding, Any, Part], None],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Do something with each of this rank's parts, tensor by tensor.

    A tensor that has to be redistributed is read by every rank of its mesh, also by one that has failed meanwhile,
    whatever its error: the others wait for it in a collective, and would wait for ever.

    Args:
        names: the tensors of the version, in the order in which all ranks go through them; None for all, by name.
    """
    failure: Exception | None = None
    for name in sorted(holdings) if names is None else names:
        if (holding := holdings.get(name)) is None:
            continue
        own = () if failure is not None else parts.get(name, ())
        if holding.target is None and not own:
            continue
        try:
            local = holding.local()
            for part in own:
                do(holding, local, part)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def lying(holding: Holding, part: SentPart) -> Any:
    """The elements of a part as a view of the trainer's tensor; None where they do not lie as they are published."""
    if holding.target is not None or str(holding.tensor.dtype) != f"torch.{holding.claim.dtype}":
        return None
    local = holding.local()
    flat = flat_box(local, holding.claim.boxes, part.part.box)
    if flat.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        return None
    return flat[part.part.begin : part.part.end]


def published(holding: Holding, local: Any, part: SentPart) -> Any:
    """The elements of a part in the published dtype: a view where they lie so.

    Args:
        local: this rank's part of it; None where that is to be looked up.
    """
    local = holding.local() if local is None else local
    flat = flat_box(local, holding.claim.boxes, part.part.box)[part.part.begin : part.part.end]
    return flat.to(getattr(sys.modules["torch"], holding.claim.dtype))


def part_input(part: SentPart, flat: Any, *, check_finite: bool) -> PartInput:
    """The elements of a part, as they are scanned."""
    from refitd_client.fingerprint.device import INTEGERS

    width = width_of(part.entry.dtype)
    rule = rule_of(part.entry.dtype) if check_finite else NO_RULE
    return PartInput(flat.view(INTEGERS[width]), part.rows(width), rule)


def add_scans(found: dict[str, tuple[int, int]], parts: Sequence[SentPart], scans: Sequence[Scan]) -> None:
    """Add what parts add to each tensor's fingerprint, and how many of their elements are not finite, by name."""
    for each, scan in zip(parts, scans, strict=True):
        before, bad = found.get(each.entry.name, (0, 0))
        found[each.entry.name] = before + scan.fingerprint, bad + scan.nonfinite


def not_finite_here(name: str, count: int) -> InvalidWeightsError:
    """The error of a rank whose part of a tensor holds `count` values that are not finite."""
    return not_finite(name, count, " in this rank's part")


def flat_box(local: Any, boxes: Sequence[Box], number: int) -> Any:
    """The elements of one of the boxes that a local tensor is made of, in order."""
    if len(boxes) > 1:
        for dim in range(local.dim()):
            sides = sorted({(box.start[dim], box.shape[dim]) for box in boxes})
            begin = sum(size for start, size in sides if start < boxes[number].start[dim])
            local = local.narrow(dim, begin, boxes[number].shape[dim])
    return flat_of(local)


class PartScanner:
    """Scans of the same parts at each step: on a GPU by a list of their addresses, which is kept while they stay there,
    for to list the parts of a model's hundreds of tensors takes longer than to read them. `check_finite` says whether
    NaN and infinity count.
    """

    def __init__(self, *, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._kept: tuple[Sequence[SentPart], list[int], StripScan] | None = None

    def scan(self, parts: Sequence[SentPart], addresses: Sequence[int], device: Any) -> list[Scan]:
        """What each part adds to its tensor's fingerprint, and how many of its elements are not finite. Along the
        current stream, and waits for it.

        Args:
            parts: the parts. The very same sequence means the same parts.
            addresses: of each part's first byte: its elements lie together in the published dtype.
        """
        if not parts:
            return []
        if device.type == "cpu" or not has_triton():
            return part_scans([self._input(*each, device) for each in zip(parts, addresses, strict=True)])
        rest = iter(self._list(parts, list(addresses), device).begin()())
        found: list[Scan] = []
        for part in parts:
            some = list(islice(rest, len(part.strips)))
            prints = sum(each.fingerprint for each in some) & MASK
            found.append(Scan(prints, sum(each.nonfinite for each in some)))
        return found

    def _list(self, parts: Sequence[SentPart], addresses: list[int], device: Any) -> "StripScan":
        kept = self._kept
        if kept is None or kept[0] is not parts or kept[1] != addresses:
            from refitd_client.fingerprint.batch import StripScan

            strips = [strip for each in zip(parts, addresses, strict=True) for strip in self._strips(*each)]
            kept = self._kept = parts, addresses, StripScan(strips, device)
        return kept[2]

    def _strips(self, part: SentPart, address: int) -> "list[MemoryStrip]":
        from refitd_client.fingerprint.batch import MemoryStrip

        width, found = width_of(part.entry.dtype), list[MemoryStrip]()
        for rows in part.rows(width):
            found.append(MemoryStrip(address, width, rows, rows.width, 1, self._rule(part)))
            address += rows.count * width
        return found

    def _input(self, part: SentPart, address: int, device: Any) -> PartInput:
        from refitd_client.fingerprint.device import bits_at

        width = width_of(part.entry.dtype)
        return PartInput(bits_at(address, part.nbytes // width, width, device), part.rows(width), self._rule(part))

    def _rule(self, part: SentPart) -> Rule:
        return rule_of(part.entry.dtype) if self._check_finite else NO_RULE
