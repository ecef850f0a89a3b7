"""In what condition a journal is. It is opened for reading only: nothing that could be evidence is changed."""

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from refitd.state.journal.reads import read_fingerprints, read_last_event, read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError, events, metadata
from refitd.state.journal.sqlite_file import schema_of
from refitd.state.journal.writes import RECORDS, row_again
from refitd.state.records import Origin

_ROLLBACK = "-journal"  # there only while a journal is made: until it is in WAL mode
SIDE_FILES = ("-wal", "-shm", _ROLLBACK)  # SQLite's own, beside the journal: https://sqlite.org/wal.html

# The last is what SQLite says where a statement does not fit the file: a column that is gone, an unknown file format.
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR})
_LOCKED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Missing:
    """There is none, or one that was never used. `leftovers` says that files of an earlier one lie there."""

    leftovers: bool = False


@dataclass(frozen=True, slots=True)
class Sound:
    """It can be read to its end. `last_event` is the number of the newest entry of its log."""

    origin: Origin
    last_event: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """It is not what was written."""

    reason: str


@dataclass(frozen=True, slots=True)
class Older:
    """An earlier refitd wrote it, with tables that this one does not read."""

    schema: int


@dataclass(frozen=True, slots=True)
class Newer:
    """A later refitd wrote it."""

    schema: int


@dataclass(frozen=True, slots=True)
class UnreadableJournal:
    """Its condition is not known: it is locked, may not be read, or its disk fails. That proves nothing."""

    reason: str


Condition = Missing | Sound | Corrupt | Older | Newer | UnreadableJournal


def examine_journal(path: Path, *, thorough: bool) -> Condition:
    """Look at the journal at `path`. `thorough` also decodes what no start reads (the event log)."""
    try:
        if not path.exists() or path.stat().st_size == 0 or path.with_name(path.name + _ROLLBACK).exists():
            return Missing(leftovers=any(path.with_name(path.name + side).exists() for side in SIDE_FILES))
        with reading(path) as connection:
            return _examine(connection, thorough=thorough)
    except (RecordDamagedError, UnicodeDecodeError) as error:  # SQLite's own texts may be what is damaged
        return Corrupt(str(error))
    except DatabaseError as error:
        return _condition_of(error.orig)
    except (OSError, sqlite3.DatabaseError) as error:
        return _condition_of(error)


@contextmanager
def reading(path: Path) -> Generator[sa.Connection]:
    """A connection that cannot change the journal.

    Raises:
        sqlalchemy.exc.DatabaseError: it cannot be opened.
    """

    def connect() -> sqlite3.Connection:
        # In a folder that may not be written, a journal that no process has open can only be read as immutable.
        alone = not any(path.with_name(path.name + side).exists() for side in SIDE_FILES)
        try:
            return _connect(path, "mode=ro")
        except sqlite3.OperationalError:
            if not alone:
                raise
            return _connect(path, "mode=ro&immutable=1")

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_LOCKED_SECONDS)
    try:
        with closing(connection.execute("PRAGMA schema_version")) as cursor:
            cursor.fetchone()  # opening reads nothing yet: this does
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(connection: sa.Connection, *, thorough: bool) -> Condition:
    schema = schema_of(connection)
    if schema > SCHEMA_VERSION:
        return Newer(schema)
    # Indexes as well, which quick_check leaves out: by them a version is read back, or is not.
    faults = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
    if faults != ["ok"]:
        return Corrupt("; ".join(faults))
    return Older(schema) if 0 < schema < SCHEMA_VERSION else _contents(connection, thorough=thorough)


def _contents(connection: sa.Connection, *, thorough: bool) -> Condition:
    schema_rows = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master").all()
    tables = {name for type_, name, *_ in schema_rows if type_ == "table"}
    origin = read_origin(connection) if "origin" in tables else None
    if origin is None:
        return _without_origin(connection, tables)
    if missing := set(metadata.tables) - tables:
        return Corrupt(f"it has no table {', '.join(sorted(missing))}")
    _read_all(connection, thorough=thorough)
    return Sound(origin, read_last_event(connection))


def _without_origin(connection: sa.Connection, tables: set[str]) -> Condition:
    """A kill while a journal is made leaves empty tables; anything else has lost its beginning."""
    if foreign := tables - set(metadata.tables):
        return Corrupt(f"it is no journal of refitd: it has a table {min(foreign)}")
    for table in tables:
        if connection.execute(sa.select(metadata.tables[table]).limit(1)).first() is not None:
            return Corrupt("its first record is gone")
    return Missing()


def _read_all(connection: sa.Connection, *, thorough: bool) -> None:
    """Decode every record, and hold the columns of its row against it.

    Raises:
        RecordDamagedError: one is not what was written.
    """
    for table in RECORDS:
        if table is not events or thorough:
            for row in connection.execute(sa.select(table)):
                row_again(table, dict(zip(table.columns.keys(), row, strict=True)))
    read_fingerprints(connection)


def _condition_of(error: BaseException | None) -> Corrupt | UnreadableJournal:
    code = getattr(error, "sqlite_errorcode", None)
    # Extended codes have the primary one in their low byte. What has no code could be read, but not decoded.
    undecodable = code is None and isinstance(error, sqlite3.Error)
    damaged = undecodable or (code is not None and code & 0xFF in _CORRUPT)
    return Corrupt(str(error)) if damaged else UnreadableJournal(str(error))
