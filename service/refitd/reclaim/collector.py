"""When the service sweeps: when something has changed, and from time to time."""

import asyncio

import structlog

from refitd.policy.spare_slots import ReclaimRules
from refitd.reclaim.facts import StoreFacts, StoreWriter
from refitd.reclaim.folders import Folders
from refitd.reclaim.sweep import CopySweep, Sweeper
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store

PACE_SECONDS = 1.0  # between two sweeps

log = structlog.get_logger("refitd")


class Collector:
    """Sweeps when something has changed, and from time to time."""

    def __init__(
        self, store: Store, facts: StoreFacts, folders: Folders, rules: ReclaimRules, copies: CopySweep | None = None
    ) -> None:
        self._store = store
        self._interval = rules.interval
        self._facts = facts
        self.sweeper = Sweeper(
            folders,
            self._facts,
            StoreWriter(store),
            store.clock,
            rules=rules.keep,
            incoming_ttl=rules.incoming_ttl,
            slots=rules.slots,
            copies=copies,
        )

    async def run(self) -> None:
        """Sweep until cancelled."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen, within=self._interval)
            try:
                if not self._store.origin.rebuilt and self._facts.rebuilding() is None:
                    self._store.rebuilt()
                await self.sweeper.run()
            except (OSError, JournalError) as error:
                log.warning("nothing was reclaimed this time", error=str(error))
            await asyncio.sleep(PACE_SECONDS)
