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


def threads_of_rank(ranks: int) -> int:
    """How many threads a rank works with: `ranks` share the host's processors, unless the launcher says how many do
    (LOCAL_WORLD_SIZE).
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // here))


class Reader:
    """Reads local tensors. One caller at a time."""

    def __init__(self, ranks: int) -> None:
        """`ranks` as in `threads_of_rank`."""
        self._pool = ThreadPoolExecutor(threads_of_rank(ranks), thread_name_prefix="refitd-rank")
        self._buffers: list[_BounceBuffer] = []

    def close(self) -> None:
        """End the threads, and free the buffers."""
        self._pool.shutdown()
        self._buffers = []

    def each(self, items: Iterable[In], do: Callable[[In], Out]) -> list[Out]:
        """Call `do` with every item, in the threads."""
        return list(self._pool.map(do, items))

    def read(self, flat: Any, begin: int, end: int, dtype: str, use: Use) -> int:
        """Have every piece of a tensor used, in any order and at once.

        No call of `use` is going on any more when this returns or raises: the files that it writes to may be closed.

        Args:
            flat: the tensor, from `flat_of`.
            begin: its first element to read.
            end: the element after the last.
            dtype: torch's name of the dtype to cast to.
            use: called with a piece's first element and its bytes, which are valid during the call.

        Returns:
            The sum of what `use` returned.
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
            self._buffers = [_BounceBuffer(torch) for _ in range(2)]
        total, filled = 0, None
        step = _BOUNCE_BYTES // kind.itemsize

        def start(buffer: _BounceBuffer) -> None:
            here = buffer.arrived().view(kind)
            work = _pieces(torch, here, buffer.first, kind, use)
            buffer.tasks = self._tasks(work, buffer.first, buffer.first + here.numel(), kind.itemsize)

        with torch.cuda.device(flat.device):
            try:
                for number, first in enumerate(range(begin, end, step)):
                    buffer = self._buffers[number % 2]
                    total += _ended(buffer.take_tasks())
                    buffer.fill(flat[first : min(first + step, end)].to(kind), first)
                    if filled is not None:
                        start(filled)
                    filled = buffer
                if filled is not None:
                    start(filled)
            finally:
                total += _ended([task for buffer in self._buffers for task in buffer.take_tasks()])
        return total


class _BounceBuffer:
    """A pinned buffer, and the threads' tasks on its content, which begins with the tensor's element `first`."""

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

    def arrived(self) -> Any:
        """Wait for the copy. Returns its bytes."""
        self._done.synchronize()
        return self._data

    def take_tasks(self) -> "list[Future[int]]":
        """The tasks, which the caller waits for."""
        tasks, self.tasks = self.tasks, []
        return tasks


def _ended(tasks: "list[Future[int]]") -> int:
    """Wait for all tasks, also after one fails; then raise its error, or add up what they return."""
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
