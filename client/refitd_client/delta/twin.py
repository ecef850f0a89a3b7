# pyright: basic
"""The comparison in torch's operations, on any device: the twin that the kernels are held against."""

from collections.abc import Sequence
from typing import Any

import torch

from refitd_client.fingerprint import twin
from refitd_client.fingerprint.definition import ROW
from refitd_client.fingerprint.rows import Part, Rows


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    """As `kernel.count`."""
    for part, low, high in _within(rows, begin, end):
        changed = _padded(part.now[_span(rows, part, low, high)] != part.base[_span(rows, part, low, high)])
        counts[low:high] = changed.reshape(-1, ROW).sum(1)


def report(starts: Any, begins: Any, out: Any) -> None:
    """As `kernel.report`."""
    out.copy_(starts[begins])


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, rooms: Sequence[Any], update: bool
) -> None:
    """As `kernel.take`; `keys` are not needed."""
    for part, low, high in _within(rows, begin, end):
        span = _span(rows, part, low, high)
        new, old = part.now[span], part.base[span]
        local = (new != old).nonzero().reshape(-1)
        at, after, before = local + span.start + part.first, new[local], old[local]
        sums[part.number, 0] += twin.share(at, after) - twin.share(at, before)
        sums[part.number, 1] += twin.nonfinite(after, part.rule).sum()
        place = slice(*(starts[[low, high]] - starts[begin]).tolist())
        for room, found in zip(rooms, (at, after, before), strict=True):
            room[place] = found
        if update:
            old[local] = after


def column_keys(device: Any) -> Any:
    """Not needed: `twin.share` has them."""
    return None


def _within(rows: Rows, begin: int, end: int) -> list[tuple[Part, int, int]]:
    """The parts that have some of the rows from `begin` to `end`, and which."""
    spans = zip(rows.parts, rows.begins, rows.begins[1:], strict=False)
    return [(part, max(low, begin), min(high, end)) for part, low, high in spans if low < end and high > begin]


def _span(rows: Rows, part: Part, low: int, high: int) -> slice:
    """Elements of the part that are in some rows."""
    begin = rows.begins[rows.parts.index(part)]
    return slice((low - begin) * ROW, min((high - begin) * ROW, part.count))


def _padded(flags: Any) -> Any:
    return torch.nn.functional.pad(flags, (0, -flags.numel() % ROW))
