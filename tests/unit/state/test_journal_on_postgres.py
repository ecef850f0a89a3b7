"""A journal in PostgreSQL: its tables, its steps to a later schema, and the root that it is about."""

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from refitd.root.ownership import StartRefusedError, owned
from refitd.state.journal import migrate, postgres
from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.condition import Sound
from refitd.state.journal.group_journal import open_group_journal
from refitd.state.journal.group_reading import examine_group, reading_group
from refitd.state.journal.journal import Journal
from refitd.state.journal.leadership import HeldLead
from refitd.state.journal.postgres import DatabaseRefusedError, PostgresDatabase
from refitd.state.journal.recovery import open_journal
from refitd.state.journal.schema import SCHEMA_VERSION, metadata
from refitd.state.journal.sqlite_file import JOURNAL_NAME

Take = Callable[..., HeldLead]
_STEP = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "{revision}", {before}
def upgrade():
    {body}
"""


def later_schema(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> int:
    """A refitd whose schema is one further, by a step that does `body`."""
    now, later = SCHEMA_VERSION, SCHEMA_VERSION + 1
    (folder / "now.py").write_text(_STEP.format(revision=now, before=None, body="pass"))
    (folder / "later.py").write_text(_STEP.format(revision=later, before=f'"{now}"', body=body))
    monkeypatch.setattr(migrate, "MIGRATIONS", folder)
    for module in (migrate, postgres):
        monkeypatch.setattr(module, "SCHEMA_VERSION", later)
    return later


def columns(database: PostgresAddress, table: str) -> set[str]:
    query = "SELECT column_name FROM information_schema.columns WHERE table_name = %s"
    with psycopg.connect(database.uri) as connection:
        return {name for (name,) in connection.execute(query, [table])}


def test_its_tables_are_those_that_the_code_reads_and_writes_by(led: Take, database: PostgresAddress) -> None:
    Journal(PostgresDatabase(database, led())).close()

    def is_ours(name: str | None, kind: str, parents: object) -> bool:
        return name not in {"leadership", "rowid", "attempts_rowid_key"}

    with reading_group(database) as connection:
        options = {"compare_type": True, "include_name": is_ours}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


def test_a_later_refitd_brings_it_to_its_schema_in_one_transaction(
    led: Take, database: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = led()
    Journal(PostgresDatabase(database, lead)).close()
    body = 'op.add_column("engines", sa.Column("more", sa.Text, server_default="x"))'
    later = later_schema(tmp_path, monkeypatch, body)
    Journal(PostgresDatabase(database, lead)).close()
    assert "more" in columns(database, "engines")
    with reading_group(database) as connection:
        assert postgres.schema_of(connection) == later


def test_a_step_that_fails_leaves_it_as_it_was(
    led: Take, database: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = led()
    Journal(PostgresDatabase(database, lead)).close()
    later_schema(tmp_path, monkeypatch, 'op.add_column("engines", sa.Column("more", sa.Text)); raise ValueError("no")')
    with pytest.raises(DatabaseRefusedError, match="cannot be brought to"):
        Journal(PostgresDatabase(database, lead))
    assert "more" not in columns(database, "engines")
    with reading_group(database) as connection:
        assert postgres.schema_of(connection) == SCHEMA_VERSION


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
    with reading_group(database) as connection, pytest.raises(sa.exc.DBAPIError, match="read-only"):
        connection.execute(sa.text("DELETE FROM origin"))
