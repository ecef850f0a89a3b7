# pyright: basic
"""What slices that stay where they are add to their tensors' fingerprints, and how many of their elements are NaN or
infinite, computed again and again on one GPU.

A slice lies in rows, which are apart in its tensor as `ElementRows` says, and in memory by a pitch of their own, as
columns of a matrix do, and what was transposed. As for whole tensors (`batch.py`) the addresses are written down once,
in lists on the device, and kernels go over these each time. Of a slice of one row what begins at a multiple of `ROW` is
read as a part of a tensor is, at the full speed of the memory; the rest by `kernel.add_strips`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint.batch import AddressScan
from refitd_client.fingerprint.host import MASK, ROW, column_keys
from refitd_client.fingerprint.parts import ElementRows
from refitd_client.fingerprint.rows import TensorPart, on_device
from refitd_client.fingerprint.tensors import Scan
from refitd_client.fingerprint.torch_ops import signed

STRIP_FIELDS = 12
TILE_ROWS, TILE_COLUMNS = 4, 256  # that a program takes at a time: four elements a thread, in 64 registers
TALL = 256  # rows of one program


@dataclass(frozen=True, slots=True)
class MemoryStrip:
    """Elements of `width` bytes that lie from `address` on: those of one row `column_place` elements apart, and rows
    `row_place`. `rows` is where they belong in their tensor, `rule` its dtype's for NaN and infinity.
    """

    address: int
    width: int
    rows: ElementRows
    row_place: int
    column_place: int
    rule: Rule = NO_RULE

    @property
    def tiles(self) -> tuple[int, int]:
        """How many programs take its rows, and how many its columns."""
        return -(-self.rows.rows // TALL), -(-self.rows.width // TILE_COLUMNS)

    def fields(self, number: int, begin: int) -> tuple[int, ...]:
        """Its line of the table.

        Args:
            number: the slice's.
            begin: the first of the programs that take it.
        """
        where, (_, across) = self.rows, self.tiles
        mask, pattern = (signed(each) for each in self.rule)
        places = self.row_place, self.column_place, across, number, mask, pattern
        return self.address, where.begin, where.width, where.rows, begin, where.pitch, *places


class StripList:
    """Strips of elements of one width, on a device. `programs` go over them."""

    def __init__(self, strips: Sequence[tuple[int, MemoryStrip]], device: Any) -> None:
        """`strips` have the slices' numbers, and all have elements."""
        self.width, self.device, self.count = strips[0][1].width, device, len(strips)
        self.has_rules = any(strip.rule != NO_RULE for _, strip in strips)
        counts = [down * across for down, across in (strip.tiles for _, strip in strips)]
        begins = np.cumsum([0, *counts])
        self.programs = int(begins[-1])
        lines = [strip.fields(number, int(begin)) for (number, strip), begin in zip(strips, begins, strict=False)]
        self.table = on_device(np.array(lines, dtype=np.int64), device)
        self.keys = on_device(column_keys().view(np.int64), device)


class StripScan:
    """The addresses of slices, on one GPU. The caller ensures that the memory is there."""

    def __init__(self, strips: Sequence[MemoryStrip], device: torch.device) -> None:
        """Write them down. Waits for the current stream, so that any stream may use it.

        Args:
            strips: the slices. Their numbers are their places among these.
            device: the GPU.
        """
        self._count, self._device = len(strips), device
        bodies: list[TensorPart] = []
        lists: dict[int, list[tuple[int, MemoryStrip]]] = {}
        for number, strip in enumerate(strips):
            body, rest = _cut(number, strip)
            bodies += [] if body is None else [body]
            if rest is not None:
                lists.setdefault(strip.width, []).append((number, rest))
        self._bodies = AddressScan(bodies, len(strips), device)
        self._lists = [StripList(each, device) for each in lists.values()]
        self._out = torch.zeros((len(strips), 2), dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()

    def begin(self) -> Callable[[], list[Scan]]:
        """Begin along the current stream, without memory that was not there before. What is returned waits for that
        stream, where it still is the current one, and gives what each slice adds, and how many of its elements are not
        finite. Call it before the next `begin`.
        """
        from refitd_client.fingerprint import kernel

        with torch.cuda.device(self._device):
            bodies = self._bodies.begin()
            self._out.zero_()
            for each in self._lists:
                kernel.add_strips(each, self._out)

        def results() -> list[Scan]:
            prints, bad = self._out.cpu().numpy().T.copy()
            rest = zip(prints.view(np.uint64).tolist(), bad.tolist(), strict=True)
            return [
                Scan((some.fingerprint + added) & MASK, some.nonfinite + count)
                for some, (added, count) in zip(bodies(), rest, strict=True)
            ]

        return results


def _cut(number: int, strip: MemoryStrip) -> tuple[TensorPart | None, MemoryStrip | None]:
    """What is read as a part of a tensor, and the rest."""
    where = strip.rows
    if where.rows > 1 or strip.column_place != 1:
        return None, strip if where.count else None
    head = min(-where.begin % ROW, where.width)
    rest = replace(strip, rows=replace(where, width=head)) if head else None
    if head == where.width:
        return None, rest
    body = TensorPart(
        number=number,
        now=strip.address + head * strip.width,
        count=where.width - head,
        width=strip.width,
        first=where.begin + head,
        rule=strip.rule,
        elements=where.begin + where.width,
    )
    return body, rest
