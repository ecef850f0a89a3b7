"""Where a trainer's pause takes effect: at the facade, not in the engine.

refitd pauses an engine for its own loads and resumes it. If the trainer's pause went to the same switch, one of the two
would undo the other's, and a trainer that dies in between would leave its engine paused for ever. So a pause ends what
runs (AReaL asks again for the rest of an answer that was aborted) and holds back what comes, until the trainer goes on.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """Open at first. Requests are counted from when they pass until they are answered to the end."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside = 0

    def close(self) -> None:
        """Hold back what comes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let everything through."""
        self._open.set()

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
