"""A local tensor's bytes in host memory, in pieces that fit the processor's cache: cast, and copied from a GPU.

From a GPU the bytes come through two pinned buffers, so that one is filled while the other is written. The buffers stay
with the publisher: pinning costs more than copying. Nothing else here calls `torch.cuda`, and that only for a tensor
that lives on a GPU and so has a context.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 2**20
_BOUNCE_BYTES = 2**25

Piece = tuple[int, NDArray[np.uint8]]


class Reader:
    """Reads local tensors. Not for several threads at once."""

    def __init__(self) -> None:
        """Pin nothing yet."""
        self._buffers: list[Any] = []

    def read(self, flat: Any, begin: int, end: int, dtype: str) -> Iterator[Piece]:
        """Elements `begin` to `end` of a flat tensor as (first element, bytes), each valid until the next is taken."""
        torch: Any = sys.modules["torch"]
        kind = getattr(torch, dtype)
        if flat.device.type == "cuda":
            return self._from_gpu(torch, flat, begin, end, kind)
        return _in_host(torch, flat, begin, end, kind)

    def _from_gpu(self, torch: Any, flat: Any, begin: int, end: int, kind: Any) -> Iterator[Piece]:
        item = kind.itemsize
        step = _BOUNCE_BYTES // item
        if not self._buffers:
            self._buffers = [torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        pending: list[tuple[int, Any, Any]] = []
        for number, first in enumerate(range(begin, end, step)):
            count = min(step, end - first)
            buffer = self._buffers[number % 2][: count * item]
            data = flat[first : first + count].to(kind).view(torch.uint8)
            buffer.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(flat.device))
            pending.append((first, buffer, done))
            if len(pending) == 2:  # the other buffer is being filled while this one is written
                yield from _arrived(*pending.pop(0), item)
        for each in pending:
            yield from _arrived(*each, item)


def _arrived(first: int, buffer: Any, done: Any, item: int) -> Iterator[Piece]:
    done.synchronize()
    data: NDArray[np.uint8] = buffer.numpy()
    for begin in range(0, len(data), CHUNK_BYTES):
        yield first + begin // item, data[begin : begin + CHUNK_BYTES]


def _in_host(torch: Any, flat: Any, begin: int, end: int, kind: Any) -> Iterator[Piece]:
    step = CHUNK_BYTES // kind.itemsize
    for first in range(begin, end, step):
        part = flat[first : min(first + step, end)].to(device="cpu", dtype=kind)
        yield first, part.view(torch.uint8).numpy()


def flat_of(tensor: Any) -> Any:
    """All elements of a plain tensor in order of index, in one dimension; a copy only where they do not lie so."""
    return tensor.detach().resolve_neg().reshape(-1)
