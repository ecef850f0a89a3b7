# pyright: basic
"""By how much changed elements move the fingerprints of their tensors, for many tensors at once."""

from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.host import Bits, terms
from refitd_client.lanes import in_lanes, lanes_for

_BLOCK = 2**18  # elements that a thread takes at a time
_GPU_BLOCK = 2**20  # the same for a GPU, where they take some 60 MB
_GPU_FROM = 2**19  # elements that are worth bringing back to it


def shifts_of(counts: Sequence[int], indices: NDArray[Any], after: Bits, before: Bits, device: Any = None) -> list[int]:
    """What the changes of each piece add to its tensor's fingerprint.

    Args:
        counts: how many elements each piece has, none 0; pieces lie one after the other in the arrays.
        indices: the elements' flat indices in their tensors.
        after: their bits now.
        before: their bits before.
        device: a GPU that may compute it; None for none.
    """
    if not counts:
        return []
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    on_gpu = device is not None and len(indices) >= _GPU_FROM
    step = _GPU_BLOCK if on_gpu else _BLOCK
    blocks = [(first, min(first + step, len(indices))) for first in range(0, len(indices), step)]
    found: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)] * len(blocks)
    add = partial(_on_device, device) if on_gpu else _in_host_memory
    places = [_pieces(begins, *block) for block in blocks]

    def work(number: int, stop: Event) -> None:
        if not stop.is_set():
            here = slice(*blocks[number])
            found[number] = add(indices[here], after[here], before[here], places[number][1])

    jobs = [partial(work, number) for number in range(len(blocks))]
    in_lanes(jobs, lanes=1 if on_gpu else lanes_for(len(jobs)))
    totals = np.zeros(len(counts), np.uint64)
    for (first, starts), sums in zip(places, found, strict=True):
        totals[first : first + len(starts)] += sums
    return totals.tolist()


def _pieces(begins: NDArray[np.int64], first: int, end: int) -> tuple[int, NDArray[np.int64]]:
    """The first piece that a block has some of, and where the pieces begin in the block."""
    low = int(np.searchsorted(begins, first, side="right")) - 1
    high = int(np.searchsorted(begins, end, side="left"))
    return low, np.maximum(begins[low:high], first) - first


def _in_host_memory(indices: NDArray[Any], after: Bits, before: Bits, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.add.reduceat(terms(indices, after) - terms(indices, before), starts)


def _on_device(
    device: Any, indices: NDArray[Any], after: Bits, before: Bits, starts: NDArray[np.int64]
) -> NDArray[np.uint64]:
    import torch

    from refitd_client.fingerprint import torch_ops

    at = torch.from_numpy(indices.astype(np.int64)).to(device)
    signed = np.uint8 if after.itemsize == 1 else np.dtype(f"i{after.itemsize}")
    now, was = (torch.from_numpy(each.view(signed)).to(device) for each in (after, before))
    sums = (torch_ops.terms(at, now) - torch_ops.terms(at, was)).cumsum(0)
    ends = torch.from_numpy(np.append(starts[1:], len(indices)) - 1).to(device)
    totals = sums[ends].cpu().numpy().view(np.uint64)
    return np.diff(totals, prepend=np.uint64(0))
