"""A journal in a PostgreSQL database, which a group of services shares. Only the one that leads writes to it.

The root's `.refitd/journal` holds the group's name, as it holds the state folder of a service alone. Another name, or a
folder with a journal, says that this is the wrong database, or the wrong root; a journal of another database would hide
what the right one knows.

A column of `leadership` says which schema the tables have. Those of an older refitd are moved into a schema of
PostgreSQL's of their own, and the journal is rebuilt, as a file of SQLite's is (`recovery.py`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, DBAPIError

from refitd.root.ownership import StartRefusedError, mark_root, mounts_now
from refitd.root.scan import Listing, scan
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.journal.recovery import (
    GROUP_NOTE,
    NOTE_NAME,
    Condition,
    Corrupt,
    Missing,
    Newer,
    Older,
    Sound,
    UnreadableJournal,
    last_state_folder,
    rebuilt_from,
    write_note,
)
from refitd.state.journal.rows import put_origin, read_last_event, read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError, metadata
from refitd.state.records import NEW, Origin
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.leadership import HeldLead, Leader, patient, read_leader

OLDEST = 140000  # PostgreSQL 14: the first that ends a session which says nothing


class DatabaseRefusedError(Exception):
    """The database cannot hold a group's journal. The message says why and what to do."""


def connect(database: PostgresAddress, idle_milliseconds: int = 0) -> psycopg.Connection:
    """Open a connection whose commits are on disk when they return. The server ends a transaction that does nothing for
    so many milliseconds; never for 0.
    """
    connection = psycopg.connect(patient(database), autocommit=True, application_name="refitd")
    idle = ["idle_in_transaction_session_timeout", str(idle_milliseconds)]
    connection.execute("SELECT set_config(%s, %s, false)", idle)
    if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
        connection.execute("SET synchronous_commit = on")
    connection.autocommit = False
    return connection


def why_unusable(connection: psycopg.Connection) -> str | None:
    """Why a database cannot hold a group's journal, in a sentence that says what to do; None where it can."""
    if connection.info.server_version < OLDEST:
        release = connection.info.parameter_status("server_version")
        return f"it is PostgreSQL {release}, and a group needs 14 or later"
    row = connection.execute("SELECT current_setting('server_encoding'), pg_is_in_recovery()").fetchone()
    encoding, is_replica = row or ("", False)
    if encoding != "UTF8":
        return f"its encoding is {encoding}: create one with ENCODING 'UTF8' TEMPLATE template0"
    if is_replica:
        return "it is a replica, which cannot be written: name the primary, or add ?target_session_attrs=read-write"
    return None


class PostgresDatabase:
    """The database of a group, for the process that leads. See `JournalDatabase`."""

    def __init__(self, database: PostgresAddress, lead: HeldLead) -> None:
        self.name = database.shown
        self.remedy = "it goes on by itself when the database answers"
        self._lead = lead
        idle = lead.times.milliseconds
        self.engine = sa.create_engine("postgresql+psycopg://", creator=lambda: connect(database, idle))

    def create(self, origin: Origin) -> None:
        """See `JournalDatabase`. An older refitd's tables are moved aside in the same transaction; those of a newer
        one, or of another program, are refused.
        """
        with self.engine.begin() as connection:
            self._lead.check(connection)
            schema = schema_of(connection)
            if schema > SCHEMA_VERSION:
                raise DatabaseRefusedError(
                    f"the journal {self.name} has schema {schema}, and this refitd knows {SCHEMA_VERSION}: "
                    "start the newer refitd that wrote it"
                )
            if schema == 0 and (foreign := set(metadata.tables) & set(sa.inspect(connection).get_table_names())):
                raise DatabaseRefusedError(
                    f"the database {self.name} has a table {min(foreign)} that no refitd has made: give refitd a "
                    "database of its own"
                )
            if 0 < schema < SCHEMA_VERSION:
                _move_aside(connection, schema)
            metadata.create_all(connection)
            if read_origin(connection) is None:
                put_origin(origin).carry_out(connection)
            connection.execute(sa.text("UPDATE leadership SET schema = :schema"), {"schema": SCHEMA_VERSION})

    def check_lead(self, connection: sa.Connection) -> None:
        self._lead.check(connection)


def schema_of(connection: sa.Connection) -> int:
    """The schema that a group's journal has; 0 where there is none yet."""
    if not sa.inspect(connection).has_table("leadership"):
        return 0
    return connection.exec_driver_sql("SELECT schema FROM leadership WHERE id = 1").scalar() or 0


def _move_aside(connection: sa.Connection, schema: int) -> None:
    """Move all tables but `leadership` into a schema that no service reads; their indexes go with them."""
    place = f"refitd_schema_{schema}"
    connection.execute(sa.schema.CreateSchema(place))
    for table in sa.inspect(connection).get_table_names():
        if table != "leadership":
            connection.exec_driver_sql(f'ALTER TABLE "{table}" SET SCHEMA {place}')


def open_group_journal(database: PostgresAddress, lead: HeldLead, root: Path) -> Journal:
    """Open the journal of a group for the process that leads it, or begin one. Blocks. A StartRefusedError says why it
    must not or cannot be used, and what to do.
    """
    note = f"{GROUP_NOTE}{lead.service}"
    try:
        before = last_state_folder(root)
        if before is not None and str(before) != note:
            _refuse_another(root, before, database)
        journal = Journal(PostgresDatabase(database, lead), _origin(root, before, database))
        try:
            # What was decided comes with the first entry. A kill before that leaves a journal without entries.
            origin = journal.read(read_origin)
            if origin is not None and origin.lost and journal.read(read_last_event) == 0:
                begins = rebuilt_from(root, _lost(root, database))
                journal.write_now([put_origin(begins.origin), *begins.writes])
            write_note(root, note)
        except BaseException:
            journal.close()
            raise
    except (DatabaseRefusedError, JournalError) as error:
        raise StartRefusedError(str(error)) from error
    except (OSError, psycopg.Error, DatabaseError) as error:
        why = str(error.orig if isinstance(error, DatabaseError) else error).strip()
        raise StartRefusedError(f"the journal {database.shown} cannot be used: {why}") from error
    return journal


def _refuse_another(root: Path, before: Path, database: PostgresAddress) -> None:
    note = root / SERVICE_FOLDER / NOTE_NAME
    if str(before).startswith(GROUP_NOTE):
        raise StartRefusedError(
            f"the journal of {root} is in another database than {database.shown}: name that one with --state; if it is "
            f"gone for good, delete {note}, and the journal is rebuilt from what is on disk"
        )
    if (before / JOURNAL_NAME).exists():
        raise StartRefusedError(
            f"the journal of {root} is in {before}: start with --state {before}; or move {before / JOURNAL_NAME}* "
            f"away, and that of {database.shown} is rebuilt from what is on disk"
        )


def _lost(root: Path, database: PostgresAddress) -> str:
    return f"{database.shown} had none, and a service has run on {root} before"


def _origin(root: Path, before: Path | None, database: PostgresAddress) -> Origin:
    """How the journal begins, should there be none in the database. `before` is the root's note."""
    mark = mark_root(root, None, has_versions=False, mounts=mounts_now())
    if before is not None:
        return Origin(cause=_lost(root, database), lost=True, rebuilt=False, root=mark)
    listing = scan(root)
    if isinstance(listing, Listing) and not listing.found:
        return replace(NEW, root=mark)
    return Origin(cause=f"{database.shown} had none, and {root} has versions already", rebuilt=False, root=mark)


@contextmanager
def reading_group(database: PostgresAddress) -> Generator[sa.Connection]:
    """A connection that cannot change the journal."""

    def reader() -> psycopg.Connection:
        connection = connect(database)
        connection.read_only = True
        return connection

    engine = sa.create_engine("postgresql+psycopg://", creator=reader, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def examine_group(database: PostgresAddress) -> Condition:
    """Look at the journal. What the records are worth is seen when they are read."""
    try:
        with reading_group(database) as connection:
            schema = schema_of(connection)
            if schema > SCHEMA_VERSION:
                return Newer(schema)
            if 0 < schema < SCHEMA_VERSION:
                return Older(schema)
            origin = read_origin(connection) if schema else None
    except RecordDamagedError as error:
        return Corrupt(str(error))
    except (psycopg.Error, DBAPIError) as error:
        return UnreadableJournal(" ".join(str(getattr(error, "orig", None) or error).split()))
    return Missing() if origin is None else Sound(origin, schema)


def look_at_group(database: PostgresAddress) -> tuple[Leader | None, str | None]:
    """Who leads a group or led last, and why its database cannot hold a journal, None where it can."""
    with connect(database) as connection:
        return read_leader(connection), why_unusable(connection)
