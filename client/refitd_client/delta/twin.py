# pyright: basic
"""The comparison in torch's operations, on any device: the twin that the kernels are held against.

It follows the same list of addresses as they do.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from refitd_client.fingerprint import twin
from refitd_client.fingerprint.definition import ROW
from refitd_client.fingerprint.rows import Rows, bits_at


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    """As `kernel.count`."""
    for number, low, high, first in _within(rows, begin, end):
        new, old = _bits(rows, number, low - first, high - first)
        counts[low:high] = _padded(new != old).reshape(-1, ROW).sum(1)


def report(starts: Any, begins: Any, out: Any) -> None:
    """As `kernel.report`."""
    out.copy_(starts[begins])


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, rooms: Sequence[Any], update: bool
) -> None:
    """As `kernel.take`; `keys` are not needed."""
    for number, low, high, first in _within(rows, begin, end):
        part = rows.listed.parts[number]
        new, old = _bits(rows, number, low - first, high - first)
        local = (new != old).nonzero().reshape(-1)
        at, after, before = local + part.first + (low - first) * ROW, new[local], old[local]
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


def _within(rows: Rows, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The parts, by number, that have some of the rows from `begin` to `end`, which, and the first of the part."""
    for number, (low, high) in enumerate(pairwise(rows.listed.begins)):
        if low < end and high > begin:
            yield number, max(low, begin), min(high, end), low


def _bits(rows: Rows, number: int, low: int, high: int) -> tuple[Any, Any]:
    """What is in some rows of a part, and what was."""
    part = rows.listed.parts[number]
    skipped = low * ROW
    count = min(high * ROW, part.count) - skipped
    places = rows.table[number, :2].tolist()
    new, old = (bits_at(place + skipped * part.width, count, part.width, rows.device) for place in places)
    return new, old


def _padded(flags: Any) -> Any:
    return torch.nn.functional.pad(flags, (0, -flags.numel() % ROW))
