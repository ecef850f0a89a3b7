# pyright: basic
"""The comparison with torch's operations, on any device: the reference that the kernels (`kernel.py`) are tested with.

It follows the same list of addresses as they do, and its functions take the same arguments.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from refitd_client.fingerprint import torch_ops
from refitd_client.fingerprint.host import ROW
from refitd_client.fingerprint.rows import Rows, bits_at


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    for _, low, high, new, old in _parts(rows, begin, end):
        flags = new != old
        padded = torch.nn.functional.pad(flags, (0, -flags.numel() % ROW))
        counts[low:high] = padded.reshape(-1, ROW).sum(1)


def report(starts: Any, begins: Any, out: Any) -> None:
    out.copy_(starts[begins])


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, rooms: Sequence[Any], update: bool
) -> None:
    """As `kernel.take`; `keys` are not needed."""
    for number, low, high, new, old in _parts(rows, begin, end):
        part = rows.listed.parts[number]
        local = (new != old).nonzero().reshape(-1)
        at, after, before = local + part.first + (low - rows.listed.begins[number]) * ROW, new[local], old[local]
        if part.strip is not None:
            row = at // part.strip.width
            at = part.strip.begin + row * part.strip.pitch + at - row * part.strip.width
        sums[part.number, 0] += torch_ops.share(at, after) - torch_ops.share(at, before)
        sums[part.number, 1] += torch_ops.nonfinite(after, part.rule).sum()
        place = slice(*(starts[[low, high]] - starts[begin]).tolist())
        for room, found in zip(rooms, (at, after, before), strict=True):
            room[place] = found
        if update:
            old[local] = after


def column_keys(device: Any) -> Any:
    """Not needed: `torch_ops.share` has them."""
    return None


def _parts(rows: Rows, begin: int, end: int) -> Iterator[tuple[int, int, int, Any, Any]]:
    """The parts that have some of the rows from `begin` to `end`: number, first and last row, bits there and before."""
    for number, (first, last) in enumerate(pairwise(rows.listed.begins)):
        if first < end and last > begin:
            part, low, high = rows.listed.parts[number], max(first, begin), min(last, end)
            skipped = (low - first) * ROW
            count = min((high - first) * ROW, part.count) - skipped
            places = rows.table[number, :2].tolist()
            new, old = (bits_at(place + skipped * part.width, count, part.width, rows.device) for place in places)
            yield number, low, high, new, old
