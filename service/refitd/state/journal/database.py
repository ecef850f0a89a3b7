"""Where a journal is kept: what `Journal` asks of SQLite's file and of a PostgreSQL database alike.

SQLite's file (WAL, synchronous=FULL) lies in the service's state folder. SQLite's own `user_version`, in its header,
says which schema the file has.
"""

import os
import sqlite3
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from refitd.state.journal.rows import put_origin, read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, metadata
from refitd.state.records import Origin
from refitd_client.files.durable import make_folders, sync_folder
from refitd_client.files.plain_file import open_plain


class JournalDatabase(Protocol):
    """A database that has the tables of `schema.py`. Sentences call it by its name, which has no password in it, and
    say by `remedy` what makes it writable again.
    """

    engine: sa.Engine
    name: str
    remedy: str

    def create(self, origin: Origin) -> None:
        """Make what is missing, all or nothing; `origin` is for a journal that begins now.

        Raises:
            OSError, sqlalchemy.exc.DatabaseError: it cannot be made.
        """
        ...

    def check_lead(self, connection: sa.Connection) -> None:
        """Raise LeadLostError where this process does not lead any more. It is called first in each transaction that
        writes.
        """
        ...


class LeadLostError(Exception):
    """Another process of the group leads now, or it cannot be known who does. The message says which."""


JOURNAL_NAME = "journal.db"
WHEN_THERE_IS_ROOM = "it goes on by itself when there is room"


class SqliteFile:
    """The file `journal.db` of a state folder. Both are made where they are missing; an OSError says why not."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():  # SQLite syncs the names in the folder, but not the folder's own
            make_folders(folder.parent)
            folder.mkdir(exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
        self.path = folder / JOURNAL_NAME
        self.name = str(self.path)
        self.remedy = WHEN_THERE_IS_ROOM
        make_private(self.path)
        self.engine = sa.create_engine(f"sqlite:///{self.path}", connect_args={"check_same_thread": False})
        event.listen(self.engine, "connect", _set_pragmas)

    def create(self, origin: Origin) -> None:
        """Make what is missing. Without an origin a journal counts as never used."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 begins one by itself only before rows are written
            for statement in _tables():
                connection.exec_driver_sql(statement)
            if read_origin(connection) is None:
                connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
                put_origin(origin).carry_out(connection)

    def check_lead(self, connection: sa.Connection) -> None:
        """The lock of the state folder has seen to it."""


@cache
def _tables() -> tuple[str, ...]:
    statements = list[CreateTable | CreateIndex]()
    for table in metadata.sorted_tables:
        statements.append(CreateTable(table, if_not_exists=True))
        statements += [
            CreateIndex(index, if_not_exists=True) for index in sorted(table.indexes, key=lambda each: str(each.name))
        ]
    return tuple(str(each.compile(dialect=sqlite.dialect())) for each in statements)


def schema_of(connection: sa.Connection) -> int:
    """The schema that a journal says it has; 0 in one that was never used."""
    return connection.exec_driver_sql("PRAGMA user_version").scalar_one()


def make_private(path: Path) -> None:
    """Let the owner alone read and write a journal, which is made if there is none.

    SQLite gives the files that it makes beside a journal the journal's mode. Call it while this process has no
    connection to the journal: closing a descriptor of the file would release SQLite's locks on it.
    """
    for file in (path, *(path.with_name(path.name + side) for side in ("-wal", "-shm"))):
        if file == path or file.exists():
            handle = open_plain(file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with suppress(PermissionError):  # another user's, shared by that user's own choice
                    os.fchmod(handle, 0o600)
            finally:
                os.close(handle)


def _set_pragmas(connection: sqlite3.Connection, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")
