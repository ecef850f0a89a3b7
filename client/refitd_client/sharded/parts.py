"""What each rank sends of a version: the parts that it would write, one after the other in memory of its own. Pure.

The parts of all ranks have each byte of the version once, whichever ranks hold it, and share the work out: that is how
ranks write files (`layout.py`). A rank sends the same bytes that it writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from refitd_client.checkpoint.header import Entry
from refitd_client.fingerprint.tensors import ElementRows
from refitd_client.sharded.layout import Claim, ShardedLayout, WritePart, runs
from refitd_client.tensors import entry_of
from refitd_client.transport.ipc.offer import side_by_side
from refitd_client.transport.shards.schedule import HeldStrip
from refitd_client.transport.shards.strips import Strip, joined


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
        """The part's bytes."""
        return (self.part.end - self.part.begin) * self.item

    def rows(self, width: int) -> list[ElementRows]:
        """The same in elements of `width` bytes, as fingerprints count them."""
        return [
            ElementRows(each.begin // width, each.width // width, each.rows, each.pitch // width)
            for each in self.strips
        ]


def sent_parts(parts: Sequence[WritePart], claims: Sequence[Claim]) -> tuple[list[SentPart], int]:
    """What one rank sends, and how many bytes of memory that takes.

    Args:
        parts: what it writes.
        claims: what it holds.
    """
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
