"""Journals and stores in tests, from a process's start to its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from refitd.clock import SystemClock
from refitd.state.journal.database import JournalDatabase
from refitd.state.journal.journal import Journal
from refitd.state.store import Store


@asynccontextmanager
async def written(place: Path | JournalDatabase | Journal) -> AsyncIterator[Journal]:
    """A journal that is written meanwhile; what is queued at the end is written before it is closed."""
    journal = place if isinstance(place, Journal) else Journal(place)
    task = asyncio.create_task(journal.run())
    try:
        yield journal
    finally:
        task.cancel()
        await asyncio.wait({task})
        journal.close()


@asynccontextmanager
async def stored(place: Path | JournalDatabase | Journal) -> AsyncIterator[Store]:
    """What a process knows of the one before; what it comes to know is written when it ends."""
    async with written(place) as journal:
        yield Store(journal, SystemClock())
        await journal.durable()
