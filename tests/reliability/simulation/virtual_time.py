"""An event loop whose time is made up: nothing is waited for, and one seed gives one order of events.

Waiting makes the clock jump to the next thing that is due. Work for threads is done on the spot, at a moment that the
seed chooses between the call and its answer, so that a kill can fall before the effect, or between it and the news.
"""

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Selects nothing; where the loop would sleep, it says for how long."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nobody will ever come")
        self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, in seconds since it was made."""

    def __init__(self, chance: random.Random) -> None:
        self._virtual = 1000.0
        self._chance = chance
        super().__init__(_Jumping(self._advance))

    def time(self) -> float:
        return self._virtual

    def _advance(self, seconds: float) -> None:
        self._virtual += max(seconds, 0.0)

    def run_in_executor(self, _: Any, work: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        answer: asyncio.Future[Any] = self.create_future()

        def act() -> None:
            try:
                result, error = work(*arguments), None
            except BaseException as caught:
                result, error = None, caught
            self.call_later(self._chance.random() * 0.005, tell, result, error)

        def tell(result: Any, error: BaseException | None) -> None:
            if answer.cancelled():
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        self.call_later(self._chance.random() * 0.005, act)
        return answer


class VirtualClock:
    """The service's clock on that loop. The wall clock may be set to anything: it is for display."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.wall_offset = 0.0

    def monotonic(self) -> float:
        return self._loop.time()

    def now(self) -> str:
        return f"{self._loop.time() + self.wall_offset:020.3f}"
