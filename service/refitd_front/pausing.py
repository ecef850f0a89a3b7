"""A trainer's pause: requests are held back at the front, and the engines are left alone.

refitd pauses an engine for its own loads and resumes it. If the trainer's pause went to the same switch, one of the two
would undo the other's, and a trainer that dies in between would leave its engine paused for ever. So a pause holds new
requests back until the trainer goes on, and may end those under way: a trainer asks again for the rest of an answer
that was aborted. After a while without an update the trainer has died, and the gate opens by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import structlog

from refitd.engine.http import KeyRefusedError
from refitd_front.engines import RequestTargets

# Seconds without an update. AReaL saves its checkpoint during the pause. To open too early breaks nothing: what is
# generated meanwhile comes from the weights of before.
LONGEST_PAUSE = 300.0
DRAIN_SECONDS = 30.0
PAUSE_AGAIN_SECONDS = 0.5

log = structlog.get_logger("refitd")


class PauseGate:
    """Holds requests back while the trainer pauses. Open at first.

    Requests are counted from when they pass until they are answered to the end.

    Args:
        engine: the engine's name in the log.
        updating: whether an update is under way; a pause lasts at least as long.
        longest_pause: seconds after which the gate opens by itself.
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
        self._open.clear()
        self._count_down()

    def open(self) -> None:
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
    def is_open(self) -> bool:
        return self._open.is_set()

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def idle(self) -> None:
        await self._idle.wait()

    @asynccontextmanager
    async def passing(self) -> AsyncGenerator[None]:
        """Wait for the gate, then count as under way inside the context."""
        await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()


class Gatekeeper:
    """A trainer's pause of what passes at one address."""

    def __init__(self, gate: PauseGate, engines: RequestTargets) -> None:
        self._gate = gate
        self._engines = engines

    @property
    def is_paused(self) -> bool:
        return not self._gate.is_open

    async def pause(self, *, aborts: bool, waits: bool = False) -> str | None:
        """Hold new requests back. Return why nothing is paused, or None.

        Args:
            aborts: the requests that run are aborted; else they go on, and the engine holds them when it loads.
            waits: returns when all requests that run are answered.
        """
        self._gate.close()
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                if aborts:
                    await self._end_all()
                elif waits:
                    await self._gate.idle()
        except (httpx.HTTPError, KeyRefusedError, TimeoutError) as error:
            self._gate.open()  # the trainer hears that nothing is paused, and so nothing is
            log.error("the trainer's pause failed", error=str(error) or "requests still run")
            return str(error) or "requests still run"
        return None

    def resume(self) -> None:
        self._gate.open()

    async def _end_all(self) -> None:
        """Abort what runs, again and again: a request may have been on its way to the engine the first time."""
        while not self._gate.is_idle:
            for engine, kind in self._engines.all():
                await engine.end_all(kind)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle(), PAUSE_AGAIN_SECONDS)
