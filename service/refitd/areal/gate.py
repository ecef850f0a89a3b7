"""Where a trainer's pause takes effect: at the facade, not in the engine.

refitd pauses an engine for its own loads and resumes it. If the trainer's pause went to the same switch, one of the two
would undo the other's, and a trainer that dies in between would leave its engine paused for ever. So a pause ends what
runs (AReaL asks again for the rest of an answer that was aborted) and holds back what comes, until the trainer goes on.
A trainer that never does has died: after a while without an update the gate opens by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import structlog

LONGEST_PAUSE = 300.0
"""Seconds without an update. AReaL saves its checkpoint during the pause. To open too early breaks nothing: what is
generated meanwhile comes from the weights of before."""

log = structlog.get_logger("refitd")


class Gate:
    """Open at first. Requests are counted from when they pass until they are answered to the end.

    `updating` says whether an update is under way, for which a pause may last.
    """

    def __init__(self, engine: str, updating: Callable[[], bool], longest_pause: float = LONGEST_PAUSE) -> None:
        self._engine = engine
        self._updating = updating
        self._longest_pause = longest_pause
        self._timer: asyncio.TimerHandle | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside = 0

    def close(self) -> None:
        """Hold back what comes from now on."""
        self._open.clear()
        self._count_down()

    def open(self) -> None:
        """Let everything through."""
        self._stop_counting()
        self._open.set()

    def _count_down(self) -> None:
        self._stop_counting()
        self._timer = asyncio.get_running_loop().call_later(self._longest_pause, self._end_of_pause)

    def _stop_counting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _end_of_pause(self) -> None:
        if self._updating():
            self._count_down()
            return
        seconds = self._longest_pause
        log.warning("paused for too long without an update: generation goes on", engine=self._engine, seconds=seconds)
        self.open()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._idle.is_set()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()

    @asynccontextmanager
    async def passing(self) -> AsyncGenerator[None]:
        """Be let through, and be under way inside."""
        await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()
