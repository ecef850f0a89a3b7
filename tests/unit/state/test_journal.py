"""The journal: what is durable is a prefix of what happened."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from refitd.clock import SystemClock
from refitd.state.journal import journal as journal_module
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME, JournalDatabase, SqliteFile
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.journal.schema import metadata
from refitd.state.records import AttemptRecord, EngineRecord, FingerprintRecord
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, VersionState
from support.fuzz import FUZZ
from support.journals import stored, written
from support.records import engine, version

Place = Callable[[], Path | JournalDatabase]  # of a journal, in a file and in PostgreSQL


def read_engines(connection: sa.Connection) -> list[EngineRecord]:
    return rows.read_records(connection, EngineRecord)


async def test_a_journal_is_for_its_owner_alone_also_in_a_folder_that_everybody_may_look_into(tmp_path: Path) -> None:
    """Addresses of servers and what went wrong with them are in it."""
    before = os.umask(0)
    try:
        Path.touch(tmp_path / JOURNAL_NAME, mode=0o644)  # as an earlier refitd made it
        async with written(tmp_path) as journal:
            journal.append(rows.put(version(1)))
            await journal.durable()
            modes = {name: oct((tmp_path / name).stat().st_mode & 0o777) for name in os.listdir(tmp_path)}
    finally:
        os.umask(before)
    assert f"{JOURNAL_NAME}-wal" in modes
    assert set(modes.values()) == {"0o600"}


def test_what_is_remembered_of_a_version_ends_with_it(tmp_path: Path) -> None:
    """A run of a hundred thousand steps leaves their ids in memory, and nothing else."""
    store = Store(Journal(tmp_path), SystemClock())
    targets = Targets(store)
    sizes: list[int] = []
    for step in range(1, 50):
        store.put_version(version(step))
        targets.refuse(version(step), "no room")
        for configuration in ("one", "other"):
            store.record_fingerprint(version(step).id, configuration, "found")
        store.put_version(version(step, state=VersionState.DELETED))
        remembered = (*vars(store).values(), *vars(targets).values())
        sizes.append(sum(len(each) for each in remembered if isinstance(each, dict)))
    assert len(store.gone) == 49
    assert sizes[-1] == sizes[0]


async def test_what_engines_gave_for_a_version_is_forgotten_with_it_also_by_the_journal(tmp_path: Path) -> None:
    """A hub that has lost its root may give the name to other contents. A clean load of these was refused after a
    restart, by what the deleted ones had given.
    """
    async with stored(tmp_path) as store:
        store.put_version(version(1))
        store.record_fingerprint(version(1).id, "c", "of the first contents")
        store.put_engine(engine(given={version(1).id: "of the first contents"}))
        store.put_version(version(1, state=VersionState.DELETED))
        store.put_version(version(1))
    async with stored(tmp_path) as again:
        assert again.fingerprint(version(1).id, "c") is None
        assert again.engines["a"].contents.given == {}


async def test_what_is_queued_when_the_service_stops_is_written(place: Place) -> None:
    async with written(place()) as journal:
        await asyncio.sleep(0)
        journal.append(rows.put(version(1)))
    async with written(place()) as journal:
        assert journal.read(rows.read_versions) == [version(1)]


async def test_commits_are_synced_to_the_disk(tmp_path: Path) -> None:
    async with written(tmp_path) as journal:

        def pragma(connection: sa.Connection, name: str) -> object:
            return connection.exec_driver_sql(f"PRAGMA {name}").scalar()

        assert journal.read(lambda connection: pragma(connection, "journal_mode")) == "wal"
        assert journal.read(lambda connection: pragma(connection, "synchronous")) == 2


async def test_a_journal_that_cannot_be_written_says_so_and_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "JOURNAL_RETRY_SECONDS", 0.01)
    async with written(tmp_path) as journal:
        other = sqlite3.connect(tmp_path / JOURNAL_NAME, isolation_level=None)
        journal.read(lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout=1"))
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(journal, "_commit", lambda batch: OSError("No space left on device"))
        journal.append(rows.put(version(1)), rows.put(version(2)))
        with pytest.raises(JournalError, match="No space left"):
            await journal.durable()
        other.execute("ROLLBACK")
        other.close()
        monkeypatch.undo()
        async with asyncio.timeout(10):
            while True:
                try:
                    await journal.durable()
                    break
                except JournalError:
                    await asyncio.sleep(0.01)
        assert journal.read(rows.read_versions) == [version(2), version(1)]


async def test_who_waits_for_what_is_told_waits_for_no_engine_also_behind_others_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with written(tmp_path) as journal:
        commit, may_commit = journal._commit, threading.Semaphore(0)
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def slow(batch: list[rows.JournalWrite]) -> Exception | None:
            loop.call_soon_threadsafe(begun.set)
            may_commit.acquire(timeout=30)
            return commit(batch)

        monkeypatch.setattr(journal, "_commit", slow)
        journal.append(rows.put(version(1)))
        told = asyncio.create_task(journal.durable(told=True))
        async with asyncio.timeout(10):
            await begun.wait()
            journal.append(rows.put(engine(serving="v1")))
            everything = asyncio.create_task(journal.durable())
            await asyncio.sleep(0)
            behind = asyncio.create_task(journal.durable(told=True))
            await asyncio.sleep(0)
            may_commit.release()
            await told
            await behind
            assert not everything.done()
            may_commit.release()
            await everything


async def test_lists_are_newest_first_and_paged(place: Place) -> None:
    """Of a run by generation and step, though a step came late; of all by when they were first seen."""
    async with written(place()) as journal:
        came = [version(3), version(1), version(1, run="b"), version(2), version(1, generation=2)]
        came = [replace(each, created_at=f"2026-01-01T00:00:0{at}.000Z") for at, each in enumerate(came)]
        journal.append(*map(rows.put, came))
        await journal.durable()
        mine = [came[4], came[0], came[3], came[1]]
        for run, listed in ((None, came[::-1]), ("run", mine)):
            last = listed[1]
            key = last.created_at, last.order.generation, last.order.step, last.run
            assert journal.read(lambda c, run=run: rows.read_versions(c, run=run)) == listed
            assert journal.read(lambda c, run=run, key=key: rows.read_versions(c, run=run, before=key)) == listed[2:]


async def test_a_store_is_read_back_as_it_was_but_trusts_no_engine(place: Place) -> None:
    async with stored(place()) as store:
        store.put_version(version(1, served_at="t"))
        store.put_version(version(2))
        store.put_version(version(0, state=VersionState.DELETED))
        store.put_engine(engine(serving=version(1).id))
        store.record_fingerprint(version(1).id, "c", "f")
        store.start_update("run", version(2).id, "newest good version")
    async with stored(place()) as again:
        assert set(again.versions) == {version(1).id, version(2).id}
        assert again.gone == {version(0).id}
        goals = Targets(again).of_run("run")
        assert (goals.target, goals.loadable, goals.last_good) == (version(2), version(2), version(1, served_at="t"))
        assert again.engines["a"].state is EngineState.PROBING
        assert again.engines["a"].serving == version(1).id
        assert again.fingerprint(version(1).id, "c") == "f"
        assert again.updates["run"].version == version(2).id
        assert again.last_event == store.last_event


async def test_an_attempt_without_an_outcome_taints_its_engine(place: Place) -> None:
    async with stored(place()) as store:
        store.put_engine(engine(serving=version(1).id))
        store.open_attempt("a", version(2).id)
    async with stored(place()) as again:
        found = again.engines["a"]
        assert (found.state, found.known, found.serving) == (EngineState.TAINTED, False, None)
        assert found.debts.unproven == (version(2).id,)
        assert found.contents.held == version(1).id
        again.open_attempt("a", version(2).id)  # the load that repairs it, and the service dies in that as well
    async with written(place()) as journal:
        last = Store(journal, SystemClock()).engines["a"]
        assert (last.known, last.contents.held) == (False, version(1).id)
        assert len(journal.read(rows.read_open_attempts)) == 1


async def test_of_an_engine_whose_load_failed_before_the_service_died_nothing_counts_as_held(place: Place) -> None:
    async with stored(place()) as store:
        store.put_engine(engine(state=EngineState.TAINTED, known=False))
        store.open_attempt("a", version(1).id)
    async with written(place()) as journal:
        assert Store(journal, SystemClock()).engines["a"].contents.held is None


async def test_attempts_are_read_in_the_order_in_which_they_began_whatever_was_written_to_them_since(
    place: Place,
) -> None:
    async with written(place()) as journal:
        store = Store(journal, SystemClock(), 7)
        first, second = (store.open_attempt("a", version(step).id) for step in (1, 2))
        store.close_attempt(replace(first, outcome="ACK"))
        await store.durable()
        found = journal.read(lambda connection: rows.read_attempts(connection, limit=10))
        assert [(attempt.id, attempt.outcome, attempt.epoch) for attempt in found] == [
            (first.id, "ACK", 7),
            (second.id, None, 7),
        ]


async def test_a_fingerprint_is_written_once_and_the_last_one_counts(place: Place) -> None:
    async with written(place()) as journal:
        for found in ("first", "second"):
            journal.append(rows.put(FingerprintRecord(version="v", configuration="c", fingerprint=found)))
        await journal.durable()
        kept = journal.read(lambda connection: rows.read_records(connection, FingerprintRecord))
        assert [each.fingerprint for each in kept] == ["second"]


async def test_engines_are_dropped_and_numbers_beyond_32_bits_are_kept(place: Place) -> None:
    async with written(place()) as journal:
        journal.append(rows.put(engine()), rows.drop_engine(engine().id))
        journal.append(rows.put(version(2**40)))
        await journal.durable()
        assert journal.read(read_engines) == []
        assert [found.order.step for found in journal.read(rows.read_versions)] == [2**40]


async def test_what_is_written_to_one_table_stays_in_order_where_a_batch_is_few_statements(place: Place) -> None:
    """Of a thousand engines that are put, one is dropped and one is put again: the last word about each counts."""
    several = [rows.put(engine(str(number))) for number in range(20)]
    later = [
        rows.drop_engine("3"),
        rows.put(engine("4", serving="v1")),
        rows.drop_engine("5"),
        rows.put(engine("3", serving="v2")),
    ]
    batch = [each for one in several for each in (one, rows.put(version(1)))] + later
    async with written(place()) as journal:
        journal.append(*batch)
        await journal.durable()
        found = {each.id: each.serving for each in journal.read(read_engines)}
        name = "sqlite" if isinstance(journal.database, SqliteFile) else "postgresql"
    assert found == {str(number): None for number in range(20) if number != 5} | {"3": "v2", "4": "v1"}
    statements = list(rows.in_few_statements(batch, name))
    assert len(statements) == 6  # five of engines, whose order matters, and one of versions
    parameters = [values for _, values in statements]
    assert sum(map(len, parameters)) == (6 if name == "sqlite" else len(batch))  # SQLite gets many rows as one text


@FUZZ
@given(texts=st.lists(st.text(), min_size=2, max_size=8))
def test_rows_that_are_written_together_are_those_that_would_be_written_one_by_one(texts: list[str]) -> None:
    """Whatever is in them: what an engine says of itself is in its record, and in the configuration that it has."""
    batch = [rows.put(engine(text, reason=text)) for text in texts]
    batch += [rows.put(_attempt(text, None if number % 2 else text)) for number, text in enumerate(texts)]
    found = list[list[object]]()
    for together in (True, False):
        database = sa.create_engine("sqlite://")
        with database.begin() as connection:
            metadata.create_all(connection)
            if together:
                for statement, values in rows.in_few_statements(batch, "sqlite"):
                    connection.execute(statement, values)
            else:
                for write in batch:
                    write.carry_out(connection)
            asked = ("SELECT rowid, *, typeof(record) FROM engines", "SELECT rowid, *, typeof(record) FROM attempts")
            found.append([[*map(tuple, connection.exec_driver_sql(each))] for each in asked])
        database.dispose()
    assert found[0] == found[1]


def _attempt(text: str, outcome: str | None) -> AttemptRecord:
    return AttemptRecord(id=text, engine=text, version=text, kind=None, started_at="now", outcome=outcome, epoch=0)
