# pyright: basic
"""Host memory that a device's results arrive in: page-locked, in few large blocks.

To lock memory takes 0.25 s a gigabyte; torch keeps blocks that were let go of, so from the second delta on it is free.
"""

from dataclasses import dataclass
from typing import Any

import torch

from refitd_client.fingerprint import Bits


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A part of a block."""

    block: Any
    begin: int
    end: int

    def part(self, begin: int, end: int) -> "Span":
        """A part of this one."""
        return Span(self.block, self.begin + begin, self.begin + end)

    def leads_to(self, other: "Span") -> bool:
        """Whether another one begins where this one ends."""
        return self.block is other.block and self.end == other.begin

    def and_on(self, other: "Span") -> "Span":
        """This one and the one that it leads to."""
        return Span(self.block, self.begin, other.end)

    def array(self) -> Bits:
        """As unsigned integers. It keeps the block."""
        array = self.block[self.begin : self.end].numpy()
        return array.view(f"u{array.itemsize}")


class Arena:
    """Blocks, one kind of number in each, filled from the front."""

    def __init__(self, least: int, *, is_pinned: bool) -> None:
        """A block holds at least `least` numbers."""
        self._least = least
        self._is_pinned = is_pinned
        self._blocks: dict[Any, tuple[Any, int]] = {}

    def reserve(self, count: int, kind: Any) -> None:
        """Have room for `count` more numbers of a type."""
        block, used = self._blocks.get(kind, (None, 0))
        if block is None or used + count > len(block):
            size = max(count, self._least)
            self._blocks[kind] = torch.empty(size, dtype=kind, pin_memory=self._is_pinned), 0

    def fill(self, source: Any) -> Span:
        """Send a device's numbers here, where room was reserved for them. They arrive in the order of its stream."""
        block, used = self._blocks[source.dtype]
        end = used + source.numel()
        block[used:end].copy_(source, non_blocking=True)
        self._blocks[source.dtype] = block, end
        return Span(block, used, end)
