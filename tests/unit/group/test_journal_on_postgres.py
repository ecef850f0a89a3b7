"""A journal in PostgreSQL: its tables, those of another schema, and the root that it is about."""

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from refitd.root.ownership import StartRefusedError, owned
from refitd.state.decisions import Decisions, write_decisions
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import Older, Sound, open_journal
from refitd.state.journal.rows import put, read_versions
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd.state.records import HostLead
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import PostgresDatabase, examine_group, open_group_journal, reading_group
from refitd_hosts.group.leadership import HeldLead
from support.records import version

Take = Callable[..., HeldLead]


def test_the_tables_of_another_schema_are_moved_aside_and_the_journal_is_rebuilt(
    led: Take, database: PostgresAddress, root: Path
) -> None:
    lead = led()
    journal = open_group_journal(database, lead, root)
    journal.write_now([put(version(1))])
    journal.close()
    hub = HostLead(leader="hub", heard={"hub": 7})
    write_decisions(root, Decisions(event=9, versions=(version(2, barred=True),), lead=hub))
    with psycopg.connect(database.uri) as connection:
        connection.execute("UPDATE leadership SET schema = %s", [SCHEMA_VERSION - 1])
    assert examine_group(database) == Older(SCHEMA_VERSION - 1)
    for _ in range(2):  # the second start finds a sound journal
        open_group_journal(database, lead, root).close()
        found = examine_group(database)
        assert isinstance(found, Sound)
        assert (found.origin.lost, found.origin.rebuilt, found.origin.lead) == (True, False, hub)
        with reading_group(database) as connection:
            assert [(each.id, each.barred) for each in read_versions(connection)] == [(version(2).id, True)]
            aside = connection.exec_driver_sql(f"SELECT count(*) FROM refitd_schema_{SCHEMA_VERSION - 1}.versions")  # noqa: S608
            assert aside.scalar() == 1


def test_a_root_is_refused_by_a_database_that_is_not_its_own(
    led: Take, database: PostgresAddress, root: Path, tmp_path: Path
) -> None:
    lead = led()
    open_group_journal(database, lead, root).close()
    open_group_journal(database, lead, root).close()
    with pytest.raises(StartRefusedError, match="is in the database of a group"):
        open_journal(tmp_path / "alone", root)
    (root / ".refitd" / "journal").write_text("postgresql:another\n")
    with pytest.raises(StartRefusedError, match="is in another database than"):
        open_group_journal(database, lead, root)
    before = tmp_path / "before"
    before.mkdir()
    (before / JOURNAL_NAME).touch()
    (root / ".refitd" / "journal").write_text(f"{before}\n")
    with pytest.raises(StartRefusedError, match="start with --state"):
        open_group_journal(database, lead, root)


def test_a_database_without_a_journal_for_a_root_that_was_in_use_is_rebuilt(
    led: Take, database: PostgresAddress, root: Path
) -> None:
    (root / ".refitd" / "journal").write_text("/gone/with/its/host\n")
    open_group_journal(database, led(), root).close()
    found = examine_group(database)
    assert isinstance(found, Sound)
    assert (found.origin.lost, found.origin.rebuilt) == (True, False)


def test_services_of_a_group_share_a_root_with_each_other_and_with_no_service_alone(root: Path) -> None:
    with owned(root, shared=True) as first, owned(root, shared=True):
        assert first.renew() is None
        with pytest.raises(StartRefusedError, match="another refitd"), owned(root):
            pass
    with owned(root), pytest.raises(StartRefusedError, match="another refitd"), owned(root, shared=True):
        pass


def test_a_reader_cannot_write(led: Take, database: PostgresAddress) -> None:
    Journal(PostgresDatabase(database, led())).close()
    with reading_group(database) as connection, pytest.raises(DBAPIError, match="read-only"):
        connection.execute(sa.text("DELETE FROM origin"))
