"""Scans of the same parts at each step: on a GPU by a list of their addresses, which is kept while they stay there.

To list the parts of a model's hundreds of tensors takes longer than to read them.
"""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from refitd_client.checkpoint.finite import NO_RULE, Rule, rule_of
from refitd_client.fingerprint import Scan, width_of
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import PartInput, has_triton, part_scans
from refitd_client.sharded.parts import SentPart

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import MemoryStrip, StripScan


class PartScanner:
    """Keeps one list. `check_finite` says whether NaN and infinity count."""

    def __init__(self, *, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._kept: tuple[Sequence[SentPart], list[int], StripScan] | None = None

    def scan(self, parts: Sequence[SentPart], addresses: Sequence[int], device: Any) -> list[Scan]:
        """What each part adds to its tensor's fingerprint, and how many of its elements are not finite. Along the
        current stream, and waits for it.

        Args:
            parts: the parts. The very same sequence means the same parts.
            addresses: of each part's first byte: its elements lie together in the published dtype.
            device: where all of them are.
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
