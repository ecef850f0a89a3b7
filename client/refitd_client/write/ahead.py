"""How far copies are begun ahead of the bus.

A GPU's queue is not long, and whoever adds to a full one waits in the driver: with the interpreter's lock (`bus.py`),
and so with every thread that digests what has arrived. So copies are begun ahead by as many as keep the bus busy for
some milliseconds, and then their arrival is waited for, where the lock is let go of.
"""

from collections import deque
from collections.abc import Callable

_MARKS = 40  # at 16 MiB each 12 ms of a bus of 55 GB/s
_ENTRIES = 160


class Ahead:
    """What was begun and not waited for, in order: each a mark (`cuda.DeviceCopies.mark`) behind some copies."""

    def __init__(self) -> None:
        """Nothing was begun."""
        self._marks: deque[tuple[Callable[[], None], int]] = deque()
        self._entries = 0

    def add(self, arrived: Callable[[], None], copies: int) -> None:
        """So many copies were begun. `arrived` waits for them."""
        self._marks.append((arrived, copies + 1))
        self._entries += copies + 1

    @property
    def is_far(self) -> bool:
        """Whether no more should be begun before some have arrived."""
        return len(self._marks) > _MARKS or self._entries > _ENTRIES

    def wait(self) -> None:
        """Until it is not far any more."""
        while self.is_far:
            arrived, entries = self._marks.popleft()
            self._entries -= entries
            arrived()
