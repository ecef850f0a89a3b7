"""The port to time, and turns of the event loop. Durations are monotonic; the wall clock is for display only."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol
from weakref import WeakKeyDictionary


class Clock(Protocol):
    """What the service asks of time."""

    def monotonic(self) -> float:
        """Seconds since some fixed point, never going back."""
        ...

    def now(self) -> str:
        """The time of day in UTC, RFC 3339, for people to read."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Turns: of many tasks that could all go on, a few do so in each turn of the event loop.
#
# A thousand engines that go on in one turn keep everything else waiting, requests to the API among it, for as long as
# the thousand take together.


AT_A_TIME = 8  # of what an engine does between two waits, a turn of the loop then has some milliseconds

_HURRIES = ContextVar("_HURRIES", default=False)


class Turns:
    """Who goes on next: those that hurry, then the others, each in the order in which they came.

    Where few come, none of them waits.
    """

    def __init__(self) -> None:
        self._hurried: deque[asyncio.Future[None]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_A_TIME  # of this turn of the loop
        self._is_counting = False

    async def mine(self) -> None:
        loop = asyncio.get_running_loop()
        queue = self._hurried if _HURRIES.get() else self._waiting
        if self._left and not queue and not self._hurried:
            self._left -= 1
            self._count(loop)
            return
        future = loop.create_future()
        queue.append(future)
        self._count(loop)
        await future

    def wake(self, futures: Iterable[asyncio.Future[None]]) -> None:
        """Set each of these futures when it is its turn; those that are done by then are left out."""
        self._waiting.extend(futures)
        if self._waiting:
            self._count(self._waiting[0].get_loop())

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._left = AT_A_TIME
        while self._left and (queue := self._hurried or self._waiting):
            future = queue.popleft()
            if not future.done():
                future.set_result(None)
                self._left -= 1
        self._is_counting = False
        if self._hurried or self._waiting or self._left < AT_A_TIME:
            self._count(asyncio.get_running_loop())


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns:
    """Return the turns of a loop: one for all of its tasks, since it is the loop's time that they share."""
    return _OF_LOOPS.setdefault(loop, Turns())


async def my_turn() -> None:
    """Wait for this task's turn among those of the running loop."""
    await turns_of(asyncio.get_running_loop()).mine()


@asynccontextmanager
async def in_turn_to_pause() -> AsyncGenerator[None]:
    """Wait for a turn to pause an engine; what is done in here then takes its turns before all others.

    So an engine generates while there is something to do for others that are paused already.
    """
    await my_turn()
    token = _HURRIES.set(True)
    try:
        yield
    finally:
        _HURRIES.reset(token)
