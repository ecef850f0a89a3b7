# pyright: basic
"""The fingerprints of many tensors that stay where they are, computed again and again: on a GPU in one launch.

A launch for each of a model's hundreds of tensors takes longer than to read them. So the addresses of all tensors are
written down once, in lists of rows on the device (`device.py`), and the kernel goes over these each time.

`StripScan` does this for slices of tensors. A slice lies in rows, which are apart in its tensor as `ElementRows` says,
and in memory by a pitch of their own, as columns of a matrix do, and what was transposed.  Of a slice of one row what
begins at a multiple of `ROW` is read as a part of a tensor is, at the full speed of the memory; the rest by
`kernel.add_strips`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint.device import Rows, TensorPart, flat_bits, grouped, on_device, signed, whole_tensor
from refitd_client.fingerprint.host import ROW, column_keys
from refitd_client.fingerprint.tensors import ElementRows, Scan, ScanInput, both, fingerprints, has_triton, scans_in

PROGRAMS_OVER_BUS = 32  # that share the reading over a bus: as fast as hundreds, and little of the GPU


class AddressScan:
    """The addresses of tensors as the kernel reads them, on one GPU. The caller ensures that the memory is there."""

    def __init__(
        self, parts: Sequence[TensorPart], count: int, device: torch.device, programs: int | None = None
    ) -> None:
        """Write them down. Waits for the current stream, so that any stream may use it.

        `count` is how many tensors there are, those without elements as well; `programs` are as for `kernel.add_scan`.
        """
        self._count, self._device, self._programs = count, device, programs
        self._lists = [Rows(each, device) for each in grouped(parts)]
        self._spare: Any = None  # results' memory, once it was read
        torch.cuda.current_stream(device).synchronize()

    def begin(self) -> Callable[[], list[Scan]]:
        """As `tensors.begin_scan`: along the current stream, which the next scan takes as well or waits for."""
        from refitd_client.fingerprint import kernel

        out, self._spare = self._spare, None
        if out is None:
            out = torch.zeros((self._count, 2), dtype=torch.int64, device=self._device)
        else:
            # Freed memory would be given back to the driver by SGLang's load, which empties torch's cache: that waits
            # for the GPU, in the pause, and so does asking for it again.
            out.zero_()
        for rows in self._lists:
            kernel.add_scan(rows, out, self._programs)

        def results() -> list[Scan]:
            found = scans_in(out)
            self._spare = out
            return found

        return results


class FixedScan(AddressScan):
    """The addresses of torch tensors on one GPU. Tensors are not kept alive: the caller does that.

    `of` makes one.
    """

    def __init__(self, inputs: Sequence[ScanInput], device: torch.device) -> None:
        """Waits for the current stream, so that any stream may use it. All tensors are `_is_read_in_place`."""
        parts = [whole_tensor(number, flat_bits(each.tensor), each.rule) for number, each in enumerate(inputs)]
        super().__init__(parts, len(inputs), device)

    @classmethod
    def of(cls, inputs: Sequence[ScanInput]) -> "FixedScan | None":
        """None where a kernel cannot read all tensors in place on one GPU: use `scan` then."""
        if not inputs or len({each.tensor.device for each in inputs}) > 1:
            return None
        if not all(_is_read_in_place(each.tensor) for each in inputs):
            return None
        return cls(inputs, inputs[0].tensor.device)


@dataclass(frozen=True, slots=True)
class Begun:
    """Fingerprints under way: what waits for each device's, and those that were computed at once."""

    ends: Sequence[Callable[[], list[Scan]]]
    rest: Sequence[int]


class FingerprintBatch:
    """Tensors whose memory stays where it is. They are kept alive; their contents may change between calls."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        """Write down the addresses. Waits for each GPU's current stream, so that any stream may be used later."""
        self._tensors = list(tensors)
        groups: dict[Any, list[int]] = {}
        self._rest: list[int] = []
        for number, tensor in enumerate(self._tensors):
            (groups.setdefault(tensor.device, []) if _is_read_in_place(tensor) else self._rest).append(number)
        self._groups = [
            (numbers, FixedScan([ScanInput(self._tensors[number]) for number in numbers], device))
            for device, numbers in groups.items()
        ]

    def fingerprints(self) -> list[int]:
        return self.end(self.begin())

    def begin(self) -> Begun:
        """Begin along each GPU's current stream. Does not wait for the GPU where kernels compute them."""
        ends = [scan.begin() for _, scan in self._groups]
        return Begun(ends, fingerprints(self._tensors[number] for number in self._rest))

    def end(self, begun: Begun) -> list[int]:
        """Wait for the GPUs. Returns the fingerprints in order."""
        found = dict(zip(self._rest, begun.rest, strict=True))
        for (numbers, _), end in zip(self._groups, begun.ends, strict=True):
            found |= {number: each.fingerprint for number, each in zip(numbers, end(), strict=True)}
        return [found[number] for number in range(len(self._tensors))]


def _is_read_in_place(tensor: Any) -> bool:
    return has_triton() and bool(tensor.is_cuda and tensor.is_contiguous() and not tensor.is_neg())


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
        return -(-self.rows.rows // TALL), -(-self.rows.width // TILE_COLUMNS)

    def fields(self, number: int, begin: int) -> tuple[int, ...]:
        """Its line of the table, as slice `number`, which the programs from `begin` on take."""
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
        """Write them down. Their numbers are their places among `strips`. Waits for the current stream, so that any
        stream may use it.
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
            return [both(*each) for each in zip(bodies(), scans_in(self._out), strict=True)]

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
