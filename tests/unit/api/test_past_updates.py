"""Past updates are summed up once, and a request reads a bounded part of the journal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.api import log
from refitd.api.log import MOST_UPDATES, PastUpdates
from refitd.clock import SystemClock
from refitd.state.journal import rows
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd_client.contract.history import PastUpdate
from refitd_client.contract.states import Kind, VersionState
from support.records import engine, version


@asynccontextmanager
async def written(folder: Path) -> AsyncIterator[Store]:
    """A store on a journal that is written."""
    journal = Journal(folder)
    task = asyncio.create_task(journal.run())
    try:
        yield Store(journal, SystemClock())
    finally:
        task.cancel()
        await asyncio.wait({task})
        journal.close()


def loaded(store: Store, step: int, name: str = "a", outcome: str | None = "ACK") -> None:
    """A load that has begun and, with an outcome, ended."""
    attempt = store.open_attempt(name, version(step).id, Kind.FULL)
    if outcome is not None:
        store.close_attempt(replace(attempt, outcome=outcome, timings={"pause": 1.0, "load": 5.0}))


async def looked(store: Store, past: PastUpdates, limit: int = MOST_UPDATES) -> tuple[list[PastUpdate], bool]:
    await store.durable()
    loading = {attempt.version for attempt in store.loading.values()}
    return store.journal.read(lambda connection: past.read(connection, None, limit, loading))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions whose loads are read from now on."""
    asked: list[str] = []
    read = rows.read_attempts

    def counted(*args: object, **how: object) -> object:
        asked.append(str(how["version"]))
        return read(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(rows, "read_attempts", counted)
    return asked


async def test_the_last_thousand_updates_are_there_deleted_ones_too(tmp_path: Path) -> None:
    async with written(tmp_path) as store:
        for step in range(1, MOST_UPDATES + 11):
            store.put_version(version(step))
        store.put_version(version(MOST_UPDATES, state=VersionState.DELETED))
        updates, complete = await looked(store, PastUpdates())
    assert complete
    assert [update.step for update in updates] == list(range(MOST_UPDATES + 10, 10, -1))
    assert updates[10].state is VersionState.DELETED


async def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counting(monkeypatch)
    async with written(tmp_path) as store:
        past = PastUpdates()
        for step in (1, 2, 3):
            store.put_version(version(step))
            loaded(store, step)
        await looked(store, past)
        asked.clear()
        await looked(store, past)
        assert asked == []
        loaded(store, 1, "b")  # an engine that comes back
        store.put_version(version(2, pinned=True))
        updates, _ = await looked(store, past)
    assert asked == ["run~v000002", "run~v000001"]
    assert [update.loads for update in updates] == [1, 1, 2]


async def test_a_load_that_ends_after_a_look_is_counted_at_the_next(tmp_path: Path) -> None:
    async with written(tmp_path) as store:
        past = PastUpdates()
        store.put_version(version(1))
        store.put_engine(engine("a"))
        loaded(store, 1, outcome=None)
        (before,), _ = await looked(store, past)
        store.close_attempt(replace(store.loading["a"], outcome="NACK"))
        (after,), _ = await looked(store, past)
    assert (before.loads, before.failed, after.loads, after.failed) == (1, {}, 1, {"NACK": 1})


async def test_a_request_reads_so_many_loads_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_LOADS", 4)
    async with written(tmp_path) as store:
        past = PastUpdates()
        for step in (1, 2, 3):
            store.put_version(version(step))
            for name in ("a", "b", "c"):
                loaded(store, step, name)
        first, complete = await looked(store, past)
        assert not complete
        assert [update.pause is not None for update in first] == [True, True, False], "the newest first"
        second, complete = await looked(store, past)
    assert complete
    assert [update.loads for update in second] == [3, 3, 3]


async def test_a_load_in_the_middle_of_which_the_service_died_is_a_failure_of_its_update(tmp_path: Path) -> None:
    """The intent is durable before the engine is told, so the next process finds and closes it."""
    async with written(tmp_path) as store:
        store.put_version(version(1))
        store.put_engine(engine("a"))
        loaded(store, 1, outcome=None)
        await store.durable()
    async with written(tmp_path) as store:
        (found,), _ = await looked(store, PastUpdates())
    assert (found.loads, found.failed) == (1, {"TAINTED": 1})


async def test_an_attempt_of_an_earlier_release_has_no_kind_and_counts_as_its_versions(tmp_path: Path) -> None:
    async with written(tmp_path) as store:
        store.put_version(version(1, kind=Kind.DELTA))
        attempt = store.open_attempt("a", version(1).id)
        store.journal.append(rows.put(replace(attempt, outcome="ACK")))
        store.loading.clear()
        (found,), _ = await looked(store, PastUpdates())
    assert found.done == {"delta": 1}
