"""A leader or a database that dies at any statement of a takeover: the journal is whole, and another leader goes on."""

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from refitd.root.ownership import StartRefusedError
from refitd.state.decisions import Decisions, write_decisions
from refitd.state.journal import rows
from refitd.state.journal.database import LeadLostError
from refitd.state.journal.recovery import Missing, Sound
from refitd.state.records import NEW
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import examine_group, open_group_journal, reading_group
from refitd_hosts.group.leadership import Candidate, HeldLead
from support import points
from support.postgres import PostgresServer
from support.records import version

LEASE = 60.0  # seconds: nothing here waits for it
PATIENCE = 60.0
_EXECUTE, _COMMIT = psycopg.Cursor.execute, psycopg.Connection.commit


@pytest.fixture
def database(postgres: PostgresServer) -> PostgresAddress:
    return PostgresAddress(postgres.database())


def lead(database: PostgresAddress) -> HeldLead:
    """Take the lead, which a session that ended a moment ago may still have."""
    candidate, ends = Candidate(database, "http://hub:8700", LEASE), time.monotonic() + PATIENCE
    while (held := candidate.try_to_lead([].append)) is None:
        assert time.monotonic() < ends, "nobody leads, and the lock is not free"
        time.sleep(0.01)
    return held


def take_over(database: PostgresAddress, root: Path, write: int | None = None) -> None:
    """Take the lead, open the journal, write to it as asked, and give both back."""
    held = lead(database)
    try:
        with closing(open_group_journal(database, held, root)) as journal:
            failed = None if write is None else journal._commit([rows.put(version(write))])
            if failed is not None:
                raise failed
    finally:
        held.release()


@contextmanager
def at_statement(number: int, act: Callable[[], None]) -> Generator[list[int]]:
    """Act right before the statement or commit of that number. What is yielded says how many there were."""
    seen = [0]

    def counted() -> None:
        seen[0] += 1
        if seen[0] == number:
            act()

    def execute(cursor: Any, *rest: Any, **named: Any) -> Any:
        counted()
        return _EXECUTE(cursor, *rest, **named)

    def commit(connection: Any) -> None:
        counted()
        _COMMIT(connection)

    cursors: Any = psycopg.Cursor
    connections: Any = psycopg.Connection
    cursors.execute, connections.commit = execute, commit
    try:
        yield seen
    finally:
        cursors.execute, connections.commit = _EXECUTE, _COMMIT


def die_at(number: int, database: PostgresAddress, root: Path, write: int) -> bool:
    """Take over in a process that is killed at a statement; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            with at_statement(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                take_over(database, root, write)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def epoch_of(database: PostgresAddress) -> int:
    with psycopg.connect(database.uri) as connection:
        if connection.execute("SELECT to_regclass('leadership')").fetchone() == (None,):
            return 0
        row = connection.execute("SELECT epoch FROM leadership").fetchone()
    return 0 if row is None else int(row[0])


def steps(database: PostgresAddress, root: Path) -> list[int]:
    """The versions that the journal has, by whom takes over next."""
    held = lead(database)
    try:
        with closing(open_group_journal(database, held, root)) as journal:
            return sorted(found.order.step for found in journal.read(rows.read_versions))
    finally:
        held.release()


@pytest.mark.points
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_9_at_every_statement_of_a_first_start_leaves_a_journal_or_none(
    postgres: PostgresServer, root: Path
) -> None:
    died = 0
    for number in points.numbers():
        database = PostgresAddress(postgres.database())
        (root / ".refitd" / "journal").unlink(missing_ok=True)
        was_killed = die_at(number, database, root, write=1)
        died += was_killed
        condition = examine_group(database)
        assert isinstance(condition, (Missing, Sound)), f"killed at statement {number}: {condition}"
        take_over(database, root)
        found = examine_group(database)
        assert isinstance(found, Sound)
        assert (found.origin.lost, found.origin.rebuilt) == (NEW.lost, NEW.rebuilt), f"killed at statement {number}"
        if not was_killed:
            break
    assert died > 10 // points.STRIDE


@pytest.mark.points
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_9_at_every_statement_of_a_rebuild_loses_no_decision(postgres: PostgresServer, root: Path) -> None:
    write_decisions(root, Decisions(event=9, versions=(version(2, barred=True),)))
    died = 0
    for number in points.numbers():
        database = PostgresAddress(postgres.database())
        (root / ".refitd" / "journal").write_text("/gone/with/its/host\n")
        was_killed = die_at(number, database, root, write=1)
        died += was_killed
        take_over(database, root)
        with reading_group(database) as connection:
            barred = [each.id for each in rows.read_versions(connection) if each.barred]
        assert barred == [version(2).id], f"killed at statement {number}"
        if not was_killed:
            break
    assert died > 10 // points.STRIDE


@pytest.mark.points
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_9_at_every_statement_of_a_takeover_loses_nothing_and_the_next_has_a_higher_epoch(
    database: PostgresAddress, root: Path
) -> None:
    take_over(database, root, write=1)
    known, died = [1], 0
    for number in points.numbers():
        before = epoch_of(database)
        was_killed = die_at(number, database, root, write=number + 1)
        died += was_killed
        after = epoch_of(database)
        assert before <= after <= before + 1
        found = steps(database, root)
        assert found in (known, [*known, number + 1]), f"killed at statement {number}"
        assert was_killed or found == [*known, number + 1]
        assert epoch_of(database) == after + 1
        known = found
        if not was_killed:
            break
    assert died > 10 // points.STRIDE


@pytest.mark.points
@pytest.mark.timeout(600)
def test_a_database_that_is_stopped_at_every_statement_of_a_takeover_loses_nothing_and_lets_the_next_lead(
    database: PostgresAddress, root: Path, postgres: PostgresServer
) -> None:
    take_over(database, root, write=1)
    known, stopped = [1], 0
    for number in points.numbers():
        before = epoch_of(database)
        with (
            at_statement(number, postgres.kill) as seen,
            suppress(psycopg.Error, DBAPIError, StartRefusedError, LeadLostError),
        ):
            take_over(database, root, write=number + 1)
        was_stopped = seen[0] >= number
        stopped += was_stopped
        if was_stopped:
            postgres.start()
        assert epoch_of(database) in (before, before + 1)
        found = steps(database, root)
        assert found in (known, [*known, number + 1]), f"stopped at statement {number}"
        known = found
        if not was_stopped:
            assert known[-1] == number + 1
            break
    assert stopped > 10 // points.STRIDE
