"""Many readers or one writer, writers first: SGLang's `model_update_lock`.

Requests read for as long as they generate; an update of weights on an engine that is not paused writes. So an update
waits for every request in flight, and while it waits no new one gets in.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class ChangeSignal:
    """Has all tasks that wait for a condition test it again. `tell` never waits, so it is safe in `finally`."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Say that something changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`."""
        while not holds():
            await self._next.wait()


class RwLock:
    """A task that is cancelled while it waits leaves the lock as it was."""

    def __init__(self) -> None:
        self._changes = ChangeSignal()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """Hold the lock together with other readers."""
        await self._changes.until(lambda: not (self._writing or self._writers_waiting))
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._changes.tell()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        self._writers_waiting += 1
        try:
            await self._changes.until(self._free)
            self._writing = True
        finally:
            # Also when cancelled: readers queue behind a writer that waits, and must not queue behind one that left.
            self._writers_waiting -= 1
            self._changes.tell()
        try:
            yield
        finally:
            self._writing = False
            self._changes.tell()

    async def until_free(self) -> None:
        """Wait until no task holds the lock."""
        await self._changes.until(self._free)

    def _free(self) -> bool:
        return not (self._readers or self._writing)
