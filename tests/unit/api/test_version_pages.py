"""Pages of versions are read again when there may be something else on them, and not before."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from refitd.api.versions import VersionPages
from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.store import Store
from support.records import engine, version


class CountedJournal(Journal):
    """A journal that counts how often it is read, and does what is to happen while it is waited for."""

    count = 0
    meanwhile: Callable[[], None] | None = None

    async def durable(self, *, told: bool = False) -> None:
        """See `Journal`."""
        await super().durable(told=told)
        if self.meanwhile is not None:
            self.meanwhile()

    def read(self, query: Callable[[sa.Connection], Any]) -> Any:
        """See `Journal`."""
        self.count += 1
        return super().read(query)


async def steps(pages: VersionPages, journal: Journal, *, run: str | None = None) -> list[int]:
    """The steps on the first page."""
    found = await pages.read(journal, run=run, state=None, before=None, limit=10)
    return [record.order.step for record in found]


async def test_a_page_is_read_once_until_a_version_changes_whatever_engines_do(tmp_path: Path) -> None:
    journal, pages = CountedJournal(tmp_path), VersionPages()
    task = asyncio.create_task(journal.run())
    store = Store(journal, SystemClock())
    store.put_version(version(1))
    journal.count = 0
    for _ in range(3):
        assert await steps(pages, journal) == [1]
        store.put_engine(engine())
    assert journal.count == 1
    store.put_version(version(2))
    assert await steps(pages, journal) == [2, 1]
    assert await steps(pages, journal, run="another") == []
    assert journal.count == 3
    for number in range(20):  # that many pages are not kept
        await steps(pages, journal, run=str(number))
    assert await steps(pages, journal) == [2, 1]
    assert journal.count == 24
    task.cancel()
    await asyncio.wait({task})
    journal.close()


async def test_what_is_told_while_a_page_is_waited_for_is_on_the_next_one(tmp_path: Path) -> None:
    journal, pages = CountedJournal(tmp_path), VersionPages()
    store = Store(journal, SystemClock())

    def put_once() -> None:
        journal.meanwhile = None
        store.put_version(version(1))

    journal.meanwhile = put_once
    assert await steps(pages, journal) == []  # it is not on disk: nobody commits yet
    task = asyncio.create_task(journal.run())
    assert await steps(pages, journal) == [1]
    task.cancel()
    await asyncio.wait({task})
    journal.close()


async def test_a_page_that_is_kept_says_nothing_that_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has read of a version relies on it."""
    journal, pages = CountedJournal(tmp_path), VersionPages()
    store = Store(journal, SystemClock())
    assert await steps(pages, journal) == []
    monkeypatch.setattr(Journal, "_commit", lambda *_: OSError("full"))
    store.put_version(version(1))
    task = asyncio.create_task(journal.run())
    with pytest.raises(JournalError):
        await steps(pages, journal)
    task.cancel()
    await asyncio.wait({task})
    journal.close()
