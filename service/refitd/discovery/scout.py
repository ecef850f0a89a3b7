"""The scout: asks all places again and again, and tells the fleet whom they name. The shell around `memory`."""

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from refitd.clock import Clock
from refitd.discovery.asking import ask
from refitd.discovery.memory import Memory, remember
from refitd.discovery.place import Place
from refitd.root.threads import RootThreads

LOOK_SECONDS = 5.0

log = structlog.get_logger("refitd")


class Scout:
    """Follows places until cancelled. `known` are the engines that were found before this start, by URL.

    `tell` hears of the engines that there are, and of the fault that keeps anyone from being let go of.
    """

    def __init__(
        self,
        places: Sequence[Place],
        known: Collection[str],
        tell: Callable[[Collection[str], str | None], None],
        clock: Clock,
    ) -> None:
        self._places = places
        self._memory = Memory(dict.fromkeys(known))
        self._tell = tell
        self._clock = clock
        self._threads = RootThreads()

    async def run(self) -> None:
        """Look now and every few seconds."""
        while self._places:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask every place once, all at the same time."""
        answers = await asyncio.gather(*(ask(place, self._threads) for place in self._places))
        before, self._memory = self._memory, remember(self._memory, answers, self._clock.monotonic())
        if self._memory.fault is not None and self._memory.fault != before.fault:
            log.warning("nobody is let go of", reason=self._memory.fault)
        self._tell(self._memory.missing_since.keys(), self._memory.fault)
