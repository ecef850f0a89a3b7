"""Of the services on one database one leads; one whose lead is over writes nothing more, and knows it in time."""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest

from refitd.state.journal import rows
from refitd.state.journal.database import LeadLostError
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.journal.recovery import Missing, Newer, Sound
from refitd_hosts.group import leadership
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import DatabaseRefusedError, PostgresDatabase, examine_group
from refitd_hosts.group.leadership import BlockedTime, Candidate, HeldLead, monotonic
from support.postgres import PostgresServer
from support.records import version

Take = Callable[..., HeldLead]
WAIT = 60.0


class Loss:
    """Waits for a lead to be lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._happened = threading.Event()

    def append(self, reason: str) -> None:
        self.reasons.append(reason)
        self._happened.set()

    def wait(self) -> str:
        assert self._happened.wait(WAIT)
        (reason,) = self.reasons
        return reason


def sql(database: PostgresAddress, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(database.uri, autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


def session_of_lead(database: PostgresAddress) -> int:
    ((found,),) = sql(database, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
    assert isinstance(found, int)
    return found


def test_of_two_services_one_leads_and_each_takeover_has_a_higher_number(led: Take, database: PostgresAddress) -> None:
    first = led()
    with closing(Candidate(database, "http://other:8700", 60.0)) as other:
        assert other.try_to_lead() is None
        seen = other.leader()
        assert seen is not None
        assert (seen.address, seen.epoch, seen.released) == ("http://hub:8700", 1, False)
        first.release()
        second = other.try_to_lead()
        assert second is not None
        assert (second.epoch, second.service) == (2, first.service)
        assert second.acts_at <= monotonic(), "the one before it has given the lead back"
        second.release()


def test_a_lock_that_came_after_the_database_hung_is_given_back_and_taken_anew(
    database: PostgresAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Candidate(database, "http://hub:8700", 6.0)) as candidate:
        times = iter([0.0, 3.0])
        monkeypatch.setattr(leadership, "monotonic", lambda: next(times))
        assert candidate.try_to_lead() is None
        monkeypatch.undo()
        lead = candidate.try_to_lead()
        assert lead is not None, "what it gave back is free"
        assert lead.why_not() is None
        lead.release()


def test_a_leader_whose_session_ends_knows_it_and_the_next_waits_until_its_lead_is_over_for_sure(
    led: Take, database: PostgresAddress
) -> None:
    loss = Loss()
    first = led(loss, lease=6.0)
    ended = monotonic()
    sql(database, f"SELECT pg_terminate_backend({session_of_lead(database)}, 60000)")
    second = led()
    assert second.acts_at >= ended + first.times.lead
    assert "session" in loss.wait()
    assert first.why_not() is not None
    assert second.why_not() is None


def test_what_a_former_leader_has_not_committed_at_the_takeover_it_never_does(
    led: Take, database: PostgresAddress
) -> None:
    loss = Loss()
    stale = Journal(PostgresDatabase(database, led(loss)))
    assert stale._commit([rows.put(version(1))]) is None
    sql(database, "UPDATE leadership SET epoch = epoch + 1")  # as a takeover does that the former leader knows not of
    assert isinstance(stale._commit([rows.put(version(2))]), LeadLostError)
    assert "epoch 2 after 1" in loss.wait()
    assert stale.read(rows.read_versions) == [version(1)]
    stale.close()


def test_a_takeover_waits_for_the_transaction_that_a_former_leader_has_begun(
    led: Take, database: PostgresAddress
) -> None:
    """Stopped between its check and its commit, it holds the row until PostgreSQL ends its session."""
    first = led(Loss(), lease=1.0)
    journal = PostgresDatabase(database, first)
    Journal(journal).close()
    with journal.engine.connect() as connection:
        transaction = connection.begin()
        first.check(connection)
        sql(database, f"SELECT pg_terminate_backend({session_of_lead(database)}, 60000)")
        candidate = Candidate(database, "http://other:8700", 1.0)
        assert candidate.try_to_lead() is None
        connection.exec_driver_sql("INSERT INTO engines VALUES ('a', '\\x00')")
        transaction.commit()
    try:
        second = candidate.try_to_lead()
        assert second is not None
        assert sql(database, "SELECT id FROM engines") == [("a",)]
        second.release()
    finally:
        candidate.close()
    journal.engine.dispose()


def test_a_leader_that_a_stopped_database_does_not_answer_gives_up_before_its_lock_is_free(
    led: Take, database: PostgresAddress, postgres: PostgresServer
) -> None:
    loss = Loss()
    lead = led(loss, lease=1.0)
    assert lead.times.lead < lead.times.lease
    postgres.signal_all(signal.SIGSTOP)
    try:
        assert "has not answered" in loss.wait()
    finally:
        postgres.signal_all(signal.SIGCONT)
    assert lead.why_not() is not None


def test_a_leader_that_could_not_run_for_longer_than_its_lead_acts_on_nothing(
    led: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = led(Loss())
    assert lead.why_not() is None
    later = monotonic() + lead.times.lead
    monkeypatch.setattr(leadership, "monotonic", lambda: later)
    assert lead.why_not() == "this service does not lead its group any more"


def test_passwords_are_in_no_sentence_and_a_url_without_a_database_is_refused() -> None:
    address = PostgresAddress("postgresql://refitd:secret@db:5432/weights?sslmode=require")
    assert address.shown == "postgresql://refitd@db:5432/weights"
    assert "secret" not in repr(address)
    with pytest.raises(ValueError, match="names no database"):
        PostgresAddress("postgresql://refitd:secret@db")


def test_a_journal_of_a_newer_refitd_and_tables_of_another_program_are_refused(
    led: Take, database: PostgresAddress
) -> None:
    lead = led()
    assert isinstance(examine_group(database), Missing)
    sql(database, "CREATE TABLE events (seq integer)")
    with pytest.raises(DatabaseRefusedError, match="has a table events that no refitd has made"):
        Journal(PostgresDatabase(database, lead))
    sql(database, "DROP TABLE events")
    Journal(PostgresDatabase(database, lead)).close()
    assert isinstance(examine_group(database), Sound)
    sql(database, "UPDATE leadership SET schema = 1000")
    assert examine_group(database) == Newer(1000)
    with pytest.raises(DatabaseRefusedError, match="start the newer refitd"):
        Journal(PostgresDatabase(database, lead))


async def test_while_the_database_is_away_writes_are_kept_in_order_and_reads_say_why(
    led: Take, database: PostgresAddress, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = led(Loss())
    monkeypatch.setattr(lead, "check", lambda connection: None)  # or the process would have ended
    journal = Journal(PostgresDatabase(database, lead))
    task = asyncio.create_task(journal.run())
    postgres.kill()
    try:
        journal.append(rows.put(version(1)), rows.put(version(2)))
        with pytest.raises(JournalError, match="cannot be written") as told:
            await journal.durable()
        assert told.value.remedy == "it goes on by itself when the database answers"
        with pytest.raises(JournalError, match="cannot be read"):
            journal.read(rows.read_versions)
    finally:
        await asyncio.to_thread(postgres.start)
    async with asyncio.timeout(WAIT):
        while True:
            try:
                await journal.durable()
                break
            except JournalError:
                await asyncio.sleep(0.05)
    assert journal.read(rows.read_versions) == [version(2), version(1)]
    task.cancel()
    await asyncio.wait({task})
    journal.close()


def test_what_once_stood_in_a_candidates_way_does_not_count_when_something_does_again_much_later() -> None:
    blocked = BlockedTime()
    assert [blocked.lasts(now, 3.0) for now in (10.0, 12.0, 13.5)] == [False, False, True]
    assert [blocked.lasts(now, 3.0) for now in (900.0, 902.0)] == [False, False]
