"""What each rank has of a version: parts of its tensors, where their elements belong, and their scans.

A rank writes, sends, lends and compares the same parts (`layout.py`). The parts of all ranks have each byte of the
version once, whichever ranks hold it, and share the work out.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.checkpoint.header import Entry
from refitd_client.delta.change import Indices, elements_of, index_type
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import Scan, width_of
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import ElementRows, PartInput, has_triton, part_scans
from refitd_client.sharded.holdings import Holding, flat_of
from refitd_client.sharded.layout import Claim, ShardedLayout, WritePart, runs
from refitd_client.tensors import entry_of
from refitd_client.transport.offer import side_by_side
from refitd_client.transport.schedule import HeldStrip, Strip, joined
from refitd_client.write.plan import not_finite

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import StripScan


@dataclass(frozen=True, kw_only=True)
class SentPart:
    """A part of one tensor: elements of a rank's box, which lie at byte `at` of what it sends. `strips` are the bytes
    of the tensor that it has, in order.
    """

    part: WritePart
    entry: Entry
    nbytes: int
    at: int
    strips: tuple[Strip, ...]

    @cached_property
    def rows(self) -> list[ElementRows]:
        """The strips in elements, as fingerprints and deltas count them."""
        width = width_of(self.entry.dtype)
        return [
            ElementRows(each.begin // width, each.width // width, each.rows, each.pitch // width)
            for each in self.strips
        ]

    @property
    def elements(self) -> int:
        return elements_of(self.entry.dtype, self.entry.shape)

    @property
    def index_type(self) -> type[np.uint32] | type[np.uint64]:
        return index_type(self.elements)

    def to_whole(self, at: Indices, out: Indices) -> None:
        """Translate indices of the part, in strict order, into those of the whole tensor: `out`, which has its type."""
        kind, begin, first = out.dtype.type, 0, 0
        for rows in self.rows:
            stop = int(np.searchsorted(at, begin + rows.count))
            local = at[first:stop].astype(kind) - kind(begin)
            if rows.rows > 1:
                local += local // kind(rows.width) * kind(rows.pitch - rows.width)
            np.add(local, kind(rows.begin), out=out[first:stop])
            begin, first = begin + rows.count, stop

    def to_part(self, whole: Indices) -> tuple[Indices, Indices]:
        """Those of some indices of the whole tensor, in strict order, that lie in the part; and where there."""
        inside, local, begin = [whole[:0]], [np.empty(0, np.uint64)], 0
        for rows in self.rows:
            last = rows.begin + (rows.rows - 1) * rows.pitch + rows.width - 1
            kind = whole.dtype.type
            first, end = whole.searchsorted(kind(rows.begin)), whole.searchsorted(kind(last), side="right")
            some = whole[int(first) : int(end)]
            at = some.astype(np.uint64) - np.uint64(rows.begin)
            if rows.rows > 1:
                row, column = np.divmod(at, np.uint64(rows.pitch))
                is_in = column < rows.width
                some, at = some[is_in], (row * np.uint64(rows.width) + column)[is_in]
            inside.append(some)
            local.append(at + np.uint64(begin))
            begin += rows.count
        return np.concatenate(inside), np.concatenate(local)


def sent_parts(parts: Sequence[WritePart], claims: Sequence[Claim]) -> list[SentPart]:
    """The parts of one rank, in memory one after the other."""
    by_name = {claim.name: claim for claim in claims}
    found: list[SentPart] = []
    for part in parts:
        claim = by_name[part.name]
        entry = entry_of(claim.name, claim.dtype, claim.shape)
        item = entry.nbytes // prod(claim.shape)  # bytes of an element, as torch counts elements
        lengths = (
            (run.at * item, (run.end - run.begin) * item)
            for run in runs(claim.boxes[part.box], claim.shape, part.begin, part.end)
        )
        nbytes = (part.end - part.begin) * item
        found.append(SentPart(part=part, entry=entry, nbytes=nbytes, at=0, strips=tuple(joined(lengths))))
    places, _ = side_by_side(each.nbytes for each in found)
    return [replace(each, at=at) for each, at in zip(found, places, strict=True)]


def held_strips(parts: Sequence[SentPart], numbers: Mapping[str, int]) -> list[HeldStrip]:
    """What one rank sends, for the schedule. `numbers` are the tensors' by name."""
    found: list[HeldStrip] = []
    for each in parts:
        at = each.at
        for strip in each.strips:
            found.append(HeldStrip(numbers[each.entry.name], strip, at))
            at += strip.nbytes
    return found


def entries_of(layout: ShardedLayout) -> list[Entry]:
    """The version's tensors, as they lie in its files."""
    return [entry for shard in layout.shards.shards for entry in shard.entries]


def flat_part(holding: Holding, part: WritePart) -> Any:
    """The elements of a part in order, in the trainer's dtype; a copy only where they do not lie so."""
    local, boxes = holding.local(), holding.claim.boxes
    if len(boxes) > 1:
        for dim in range(local.dim()):
            sides = sorted({(box.start[dim], box.shape[dim]) for box in boxes})
            begin = sum(size for start, size in sides if start < boxes[part.box].start[dim])
            local = local.narrow(dim, begin, boxes[part.box].shape[dim])
    return flat_of(local)[part.begin : part.end]


def lying(holding: Holding, part: SentPart) -> Any:
    """The elements of a part as a view of the trainer's tensor; None where they do not lie as they are published."""
    if str(holding.tensor.dtype) != f"torch.{holding.claim.dtype}":
        return None
    flat = flat_part(holding, part.part)
    is_view = flat.untyped_storage().data_ptr() == holding.local().untyped_storage().data_ptr()
    return flat if is_view else None


def published(holding: Holding, part: SentPart) -> Any:
    """The elements of a part in the published dtype: a view where they lie so."""
    return flat_part(holding, part.part).to(getattr(sys.modules["torch"], holding.claim.dtype))


def add_scans(found: dict[str, tuple[int, int]], parts: Sequence[SentPart], scans: Sequence[Scan]) -> None:
    """Add what parts add to each tensor's fingerprint, and how many of their elements are not finite, by name."""
    for each, scan in zip(parts, scans, strict=True):
        before, bad = found.get(each.entry.name, (0, 0))
        found[each.entry.name] = (before + scan.fingerprint) & MASK, bad + scan.nonfinite


def not_finite_here(name: str, count: int) -> InvalidWeightsError:
    """The error of a rank whose part of a tensor holds `count` values that are not finite."""
    return not_finite(name, count, " in this rank's part")


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
        current stream, and waits for it. `parts`: the parts. The very same sequence means the same parts. `addresses`:
        of each part's first byte: its elements lie together in the published dtype.
        """
        if not parts:
            return []
        if device.type == "cpu" or not has_triton():
            from refitd_client.fingerprint.device import bits_at

            sizes = [(each.nbytes // (width := width_of(each.entry.dtype)), width) for each in parts]
            return self.scan_flats(
                parts, [bits_at(at, *size, device) for at, size in zip(addresses, sizes, strict=True)]
            )
        rest = iter(self._list(parts, list(addresses), device).begin()())
        found: list[Scan] = []
        for part in parts:
            some = list(islice(rest, len(part.strips)))
            prints = sum(each.fingerprint for each in some) & MASK
            found.append(Scan(prints, sum(each.nonfinite for each in some)))
        return found

    def scan_flats(self, parts: Sequence[SentPart], flats: Sequence[Any]) -> list[Scan]:
        """The same of parts whose elements are in these tensors, in the published dtype."""
        from refitd_client.fingerprint.device import INTEGERS

        return part_scans(
            [
                PartInput(flat.view(INTEGERS[width_of(each.entry.dtype)]), each.rows, self._rule(each))
                for each, flat in zip(parts, flats, strict=True)
            ]
        )

    def _list(self, parts: Sequence[SentPart], addresses: list[int], device: Any) -> "StripScan":
        from refitd_client.fingerprint.batch import MemoryStrip, StripScan

        kept = self._kept
        if kept is None or kept[0] is not parts or kept[1] != addresses:
            strips: list[MemoryStrip] = []
            for part, address in zip(parts, addresses, strict=True):
                at, width = address, width_of(part.entry.dtype)
                for rows in part.rows:
                    strips.append(MemoryStrip(at, width, rows, rows.width, 1, self._rule(part)))
                    at += rows.count * width
            kept = self._kept = parts, addresses, StripScan(strips, device)
        return kept[2]

    def _rule(self, part: SentPart) -> Any:
        return rule_of(part.entry.dtype) if self._check_finite else NO_RULE
