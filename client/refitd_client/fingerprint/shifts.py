"""By how much changed elements move the fingerprints of their tensors, for many tensors at once."""

from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.host import Bits, terms
from refitd_client.lanes import in_lanes, lanes_for

_SHIFTED = 2**18  # elements that a thread takes at a time


def shifts_of(counts: Sequence[int], indices: NDArray[Any], after: Bits, before: Bits) -> list[int]:
    """What the changes of each piece add to its tensor's fingerprint.

    Args:
        counts: how many elements each piece has, none 0; pieces lie one after the other in the arrays.
        indices: the elements' flat indices in their tensors.
        after: their bits now.
        before: their bits before.
    """
    if not counts:
        return []
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    blocks = [(first, min(first + _SHIFTED, len(indices))) for first in range(0, len(indices), _SHIFTED)]
    found: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)] * len(blocks)
    places = [_pieces(begins, *block) for block in blocks]

    def work(number: int, stop: Event) -> None:
        if not stop.is_set():
            here = slice(*blocks[number])
            moved = terms(indices[here], after[here]) - terms(indices[here], before[here])
            found[number] = np.add.reduceat(moved, places[number][1])

    jobs = [partial(work, number) for number in range(len(blocks))]
    in_lanes(jobs, lanes=lanes_for(len(jobs)))
    totals = np.zeros(len(counts), np.uint64)
    for (first, starts), sums in zip(places, found, strict=True):
        totals[first : first + len(starts)] += sums
    return totals.tolist()


def _pieces(begins: NDArray[np.int64], first: int, end: int) -> tuple[int, NDArray[np.int64]]:
    """The first piece that a block has some of, and where the pieces begin in the block."""
    low = int(np.searchsorted(begins, first, side="right")) - 1
    high = int(np.searchsorted(begins, end, side="left"))
    return low, np.maximum(begins[low:high], first) - first
