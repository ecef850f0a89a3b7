"""The log of decisions by run, engine and severity: what an entry concerns is written with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refitd.state.journal import rows
from refitd.state.observer import LogFilter
from refitd.state.store import Store
from refitd_client.contract.states import EngineState, LogSeverity, VersionState
from refitd_client.contract.wire import Event
from support.journals import stored
from support.records import engine, version


async def found(store: Store, **wanted: Any) -> list[str]:
    await store.durable()
    events, _ = store.journal.read(
        lambda connection: rows.read_log(connection, before=None, limit=50, wanted=LogFilter(**wanted))
    )
    return [event.text for event in reversed(events)]


async def test_the_log_of_a_run_has_its_versions_and_the_engines_that_followed_it_at_the_time(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        store.put_version(version(1, run="monday"), "monday's came")
        store.put_version(version(1, run="tuesday"), "tuesday's came")
        follower = engine(run="monday")
        store.put_engine(follower, "follows monday")
        store.put_engine(replace(follower, run="tuesday"), "follows tuesday")
        store.drop_engine(follower.id)
        store.close_run("monday")
        store.say("root", "root", "the disk is full", is_fault=True)
        assert await found(store, run="monday") == ["monday's came", "follows monday", "run monday is closed"]
        assert await found(store, run="tuesday") == ["tuesday's came", "follows tuesday", "removed"]
        assert await found(store, engine=follower.id) == ["follows monday", "follows tuesday", "removed"]
        assert await found(store, engine=follower.id, run="monday") == ["follows monday"]


async def test_a_warning_is_what_failed_was_refused_or_cannot_be_reached(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        store.put_version(version(1), "came")
        store.put_version(version(1, state=VersionState.REJECTED), "rejected")
        away = engine(state=EngineState.UNREACHABLE)
        store.put_engine(away, "away")
        store.put_engine(replace(away, state=EngineState.IN_SYNC), "back")
        store.say("root", "root", "the disk is full", is_fault=True)
        assert await found(store, severity=LogSeverity.WARNING) == ["rejected", "away", "the disk is full"]
        assert await found(store, severity=LogSeverity.INFO) == await found(store)


@pytest.mark.parametrize("limit", [1, 7, 50])
async def test_pages_of_a_filter_have_every_entry_once_however_rare_they_are(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LOOKED_AT", 20)
    monkeypatch.setattr(rows, "_ROWS", 10)
    async with stored(tmp_path) as store:
        store.journal.append(*(rows.put(entry(seq)) for seq in range(1, 101)))
        await store.durable()
        before: int | None = None
        seen, pages = list[int](), 0
        while pages == 0 or before is not None:
            page, before = next_page(store, before, limit)
            seen, pages = [*seen, *(event.seq for event in page)], pages + 1
            assert len(page) <= limit
    assert seen == [90, 60, 30]
    assert pages > 3


def next_page(store: Store, before: int | None, limit: int) -> tuple[Sequence[Event], int | None]:
    wanted = LogFilter(run="rare")
    return store.journal.read(lambda connection: rows.read_log(connection, before=before, limit=limit, wanted=wanted))


def entry(seq: int) -> Event:
    run = "rare" if seq % 30 == 0 else "frequent"
    return Event(seq=seq, at="2026-11-21T12:00:00.000Z", kind="run", subject=run, text="it happened", run=run)
