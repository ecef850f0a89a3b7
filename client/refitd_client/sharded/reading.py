"""A local tensor's bytes in host memory, in pieces that fit the processor's cache: cast, and copied from a GPU.

Pieces are taken by several threads, as many as this rank's share of the processors. From a GPU the bytes come through
two pinned buffers: one is filled while the threads work on the other. Buffers and threads stay with the publisher, for
pinning costs more than copying. `torch.cuda` is called only for a tensor that lives on a GPU and so has a context.
"""

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 2**20
_TASK_BYTES = 2**22  # worth handing to a thread
_BOUNCE_BYTES = 2**26
_MOST_THREADS = 16

Use = Callable[[int, NDArray[np.uint8]], int]
In = TypeVar("In")
Out = TypeVar("Out")


class Reader:
    """Reads local tensors. One caller at a time."""

    def __init__(self, ranks: int) -> None:
        """`ranks` share the host's processors, where the launcher does not say how many do."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
        threads = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // here))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="refitd-rank")
        self._buffers: list[_Bounce] = []

    def close(self) -> None:
        """End the threads, and let the buffers go."""
        self._pool.shutdown()
        self._buffers = []

    def each(self, items: Iterable[In], do: Callable[[In], Out]) -> list[Out]:
        """Do something with every item, in the threads."""
        return list(self._pool.map(do, items))

    def read(self, flat: Any, begin: int, end: int, dtype: str, use: Use) -> int:
        """Have `use(first element, bytes)` called with every piece of elements `begin` to `end`; add up its results.

        Pieces come in any order and at once; their bytes are valid during the call. No call is going on any more when
        this returns or raises: what they write to may be closed then.
        """
        torch: Any = sys.modules["torch"]
        kind = getattr(torch, dtype)
        if flat.device.type == "cuda":
            return self._from_gpu(torch, flat, begin, end, kind, use)
        work = _pieces(torch, flat, 0, kind, use)
        if (end - begin) * kind.itemsize <= _TASK_BYTES:
            return work(begin, end)
        return _ended(self._tasks(work, begin, end, kind.itemsize))

    def _tasks(self, work: Callable[[int, int], int], begin: int, end: int, item: int) -> "list[Future[int]]":
        step = _TASK_BYTES // item
        return [self._pool.submit(work, first, min(first + step, end)) for first in range(begin, end, step)]

    def _from_gpu(self, torch: Any, flat: Any, begin: int, end: int, kind: Any, use: Use) -> int:
        if not self._buffers:
            self._buffers = [_Bounce(torch) for _ in range(2)]
        total, filled = 0, None
        step = _BOUNCE_BYTES // kind.itemsize
        with torch.cuda.device(flat.device):
            try:
                for number, first in enumerate(range(begin, end, step)):
                    bounce = self._buffers[number % 2]
                    total += _ended(bounce.take_tasks())
                    bounce.fill(flat[first : min(first + step, end)].to(kind), first)
                    if filled is not None:
                        self._start(torch, filled, kind, use)
                    filled = bounce
                if filled is not None:
                    self._start(torch, filled, kind, use)
            finally:
                total += _ended([task for bounce in self._buffers for task in bounce.take_tasks()])
        return total

    def _start(self, torch: Any, bounce: "_Bounce", kind: Any, use: Use) -> None:
        here = bounce.arrived().view(kind)
        work = _pieces(torch, here, bounce.first, kind, use)
        bounce.tasks = self._tasks(work, bounce.first, bounce.first + here.numel(), kind.itemsize)


class _Bounce:
    """A pinned buffer, and the work that is being done on what is in it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._memory = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._data: Any = None
        self._done: Any = None
        self.first = 0
        self.tasks: list[Future[int]] = []

    def fill(self, data: Any, first: int) -> None:
        """Begin to copy elements from a GPU."""
        raw = data.view(self._torch.uint8)
        self._data, self.first = self._memory[: raw.numel()], first
        self._data.copy_(raw, non_blocking=True)
        self._done = self._torch.cuda.Event()
        self._done.record()

    def take_tasks(self) -> "list[Future[int]]":
        """Who is at work on the bytes; they are the caller's to wait for."""
        tasks, self.tasks = self.tasks, []
        return tasks

    def arrived(self) -> Any:
        """The bytes, when all are there."""
        self._done.synchronize()
        return self._data


def _ended(tasks: "list[Future[int]]") -> int:
    """Wait for all of them, whatever becomes of one; then raise its error, or add up what they return."""
    try:
        wait(tasks, return_when=FIRST_EXCEPTION)
    finally:
        begun = [task for task in tasks if not task.cancel()]
        wait(begun)
    return sum(task.result() for task in begun)


def _pieces(torch: Any, flat: Any, shift: int, kind: Any, use: Use) -> Callable[[int, int], int]:
    """Work on elements of a tensor in host memory, whose first element has number `shift`."""
    step = PIECE_BYTES // kind.itemsize

    def work(begin: int, end: int) -> int:
        total = 0
        for first in range(begin, end, step):
            part = flat[first - shift : min(first + step, end) - shift].to(device="cpu", dtype=kind)
            total += use(first, part.view(torch.uint8).numpy())
        return total

    return work


def flat_of(tensor: Any) -> Any:
    """All elements of a plain tensor in order of index, in one dimension; a copy only where they do not lie so."""
    return tensor.detach().resolve_neg().reshape(-1)
