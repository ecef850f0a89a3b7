"""A leader that is cut off from the database is followed, and when the line heals nothing of it is written."""

import threading
from collections.abc import Generator
from functools import partial
from itertools import count
from pathlib import Path

import psycopg
import pytest

from refitd.state.journal.database import LeadLostError
from refitd.state.journal.journal import Journal
from refitd.state.journal.rows import put
from refitd.state.journal.schema import unpack
from refitd.state.version import VersionRecord
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import PostgresDatabase
from refitd_hosts.group.leadership import EXIT_LEAD_LOST, Candidate, HeldLead
from support.hubs import Group, leader_of, rows, until
from support.line import Line, line
from support.mini_vllm import mini_vllm
from support.postgres import PostgresServer
from support.records import version

_LEASE = "6"  # seconds: on a machine that does much else a leader must not lose the lead by itself
_TAKEOVERS = 6


@pytest.fixture
def cut_off(postgres: PostgresServer) -> Generator[Line]:
    with line(postgres.port) as made:
        yield made


@pytest.fixture
def group(tmp_path: Path, postgres: PostgresServer, cut_off: Line) -> Generator[Group]:
    """A group whose first service reaches the database by a line."""
    database = postgres.database()
    with mini_vllm(tmp_path) as engine:
        found = Group(tmp_path, database, engine, "--lease", _LEASE)
        found.hubs[0].name_database(database.replace(f":{postgres.port}/", f":{cut_off.port}/"))
        try:
            yield found
        finally:
            cut_off.heal()
            found.stop()


@pytest.mark.timeout(300)
def test_a_leader_that_is_cut_off_ends_and_after_the_partition_has_healed_nothing_of_it_is_written(
    group: Group, cut_off: Line
) -> None:
    one, other = group.hubs
    one.start()
    assert leader_of([one]) is one
    other.start()
    group.until_served(one, group.publish(1))
    cut_off.cut()
    second = group.publish(2)  # it sees the files, and engines answer it
    one.died()
    assert one.process.wait(10) == EXIT_LEAD_LOST
    until(other.leads, "the other one leads")
    group.until_served(other, second)
    cut_off.heal()  # what was sent in the first one's sessions arrives now
    one.port = 0
    one.start()
    group.until_served(other, group.publish(3))
    assert not one.leads()
    group.check(3)
    assert rows(group.database, "SELECT epoch FROM leadership") == [(2,)]


@pytest.mark.timeout(120)
def test_a_leader_that_was_cut_off_in_the_middle_of_a_write_does_not_keep_the_lead(
    postgres: PostgresServer,
) -> None:
    """What it has sent holds the row of the lead, and PostgreSQL ends no session that is in the middle of a message."""
    database = PostgresAddress(postgres.database())
    _lead(database).release()
    with psycopg.connect(database.uri, autocommit=True) as former:
        for name in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
            former.execute(f"SET {name} = 500")
        line = former.pgconn
        line.enter_pipeline_mode()
        for statement in (b"BEGIN", b"SELECT epoch FROM leadership WHERE id = 1 FOR SHARE"):
            line.send_query_params(statement, None)
        line.send_flush_request()
        line.flush()
        candidate = Candidate(database, "http://other:8700", 3.0)
        until(partial(_holds, database), "the former leader's transaction holds the row")
        found: list[HeldLead] = []
        until(lambda: found.extend(filter(None, [candidate.try_to_lead([].append)])) or found, "the other one leads")
        found[0].release()
        former.pgconn.finish()


def _holds(database: PostgresAddress) -> bool:
    query = "SELECT 1 FROM pg_locks WHERE relation = 'leadership'::regclass AND mode = 'RowShareLock'"
    return bool(rows(database.uri, query))


def _lead(database: PostgresAddress) -> HeldLead:
    found: list[HeldLead] = []
    candidate = Candidate(database, "http://hub:8700", 60.0)

    def taken() -> bool:
        found.extend(filter(None, [candidate.try_to_lead([].append)]))
        return bool(found)

    until(taken, "the lead is free")
    return found[0]


def _write_on(journal: Journal, epoch: int, ended: list[Exception]) -> None:
    """Write as fast as it goes, until that is refused."""
    for number in count(1):
        failed = journal._commit([put(version(number % 10, reason=f"{epoch}"))])
        if failed is not None:
            ended.append(failed)
            return


@pytest.mark.timeout(300)
def test_two_leaders_never_both_write_however_often_the_lead_changes_hands(postgres: PostgresServer) -> None:
    """Each goes on writing when its session was ended, and does not hear of it. A trigger notes each write's epoch."""
    database = PostgresAddress(postgres.database())
    ended: list[Exception] = []
    threads: list[threading.Thread] = []
    journals: list[Journal] = []
    leads = [lead := _lead(database)]
    Journal(PostgresDatabase(database, lead)).close()
    with psycopg.connect(database.uri, autocommit=True) as connection:
        connection.execute("CREATE TABLE written (number bigint GENERATED ALWAYS AS IDENTITY, reason bytea)")
        connection.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO written (reason) VALUES (NEW.record); RETURN NEW; END $$"
        )
        connection.execute(
            "CREATE TRIGGER noted BEFORE INSERT OR UPDATE ON versions FOR EACH ROW EXECUTE FUNCTION note()"
        )
        for _ in range(_TAKEOVERS):
            journals.append(Journal(PostgresDatabase(database, lead)))
            thread = threading.Thread(target=_write_on, args=(journals[-1], lead.epoch, ended))
            thread.start()
            threads.append(thread)
            enough = _count(connection) + 20
            until(partial(_has_written, connection, enough), "it writes")
            connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            )
            leads.append(lead := _lead(database))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        noted = [bytes(record) for (record,) in connection.execute("SELECT reason FROM written ORDER BY number")]
    for lead in leads:
        lead.release()
    for journal in journals:
        journal.close()
    assert [type(each) for each in ended] == [LeadLostError] * _TAKEOVERS
    epochs = [_epoch(record) for record in noted]
    assert epochs == sorted(epochs), "a former leader has written after its takeover"
    assert set(epochs) == set(range(1, _TAKEOVERS + 1))


def _has_written(connection: psycopg.Connection, enough: int) -> bool:
    return _count(connection) >= enough


def _count(connection: psycopg.Connection) -> int:
    ((found,),) = connection.execute("SELECT count(*) FROM written").fetchall()
    return found


def _epoch(record: bytes) -> int:
    return int(unpack(record, VersionRecord).reason or "0")
