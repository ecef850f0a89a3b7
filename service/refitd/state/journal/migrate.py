"""An older journal becomes one of this refitd: a copy is kept, then all steps in one transaction.

    killed, or the power is cut,
    while the copy is written                     the journal is as it was; the next start writes the copy again
    before the end of the transaction             the journal is as it was
    after it                                      the journal is this refitd's, and the copy lies beside it

Which schema a journal has is said by SQLite's own `user_version`, in its header, so that it changes with what it speaks
of; in PostgreSQL by a column of `leadership`, which is written in the same transaction (`postgres.py`). Alembic carries
the steps out; it is imported only where there is one.
"""

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from refitd.state.journal.copies import drop_old_copies, keep_copy
from refitd.state.journal.schema import SCHEMA_VERSION

MIGRATIONS = Path(__file__).parent / "migrations"


class MigrationError(Exception):
    """A journal cannot be brought to this refitd's schema; it is as it was. The message says why."""


def schema_of(connection: sa.Connection) -> int:
    """The schema that a journal says it has; 0 in one that was never used."""
    return connection.exec_driver_sql("PRAGMA user_version").scalar_one()


def is_older(schema: int) -> bool:
    """Whether steps lead from it to this refitd's."""
    return 0 < schema < SCHEMA_VERSION


@contextmanager
def in_one_transaction(engine: sa.Engine) -> Generator[sa.Connection]:
    """All that is done in the block happens, or nothing of it: tables and the schema's number, too.

    Raises:
        sqlalchemy.exc.DatabaseError: it cannot be begun or ended.
    """
    with engine.begin() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 begins one by itself only before rows are written
        yield connection


def take_steps(connection: sa.Connection, schema: int) -> None:
    """Carry out the steps from `schema` (0: nothing) to this refitd's, in the transaction that the caller has begun.

    Raises:
        MigrationError: one fails.
    """
    # Here, because no other start needs half a second of imports.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    steps = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    with Operations.context(MigrationContext.configure(connection)):
        for step in reversed([*steps.iterate_revisions(str(SCHEMA_VERSION), str(schema) if schema else None)]):
            try:
                step.module.upgrade()
            except Exception as error:
                raise MigrationError(f"the step to schema {step.revision} fails: {_told(error)}") from error
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")


def _told(error: Exception) -> str:
    """What SQLite says, without what the library adds for programmers; of anything else also what kind it is."""
    return str(error.orig) if isinstance(error, DBAPIError) else f"{type(error).__name__}: {error}"


def migrate(path: Path, schema: int) -> Path:
    """Bring the journal at `path` from `schema` to this refitd's; return where the copy lies of what it was.

    Raises:
        MigrationError: it cannot be done.
    """
    try:
        kept = keep_copy(path, schema)
        engine = sa.create_engine("sqlite://", creator=lambda: _durable(path), poolclass=sa.NullPool)
        with in_one_transaction(engine) as connection:
            take_steps(connection, schema)
        drop_old_copies(path)
    except (OSError, sqlite3.Error, DBAPIError) as error:
        raise MigrationError(_told(error)) from error
    return kept


@contextmanager
def migrated_copy(journal: sqlite3.Connection, schema: int) -> Generator[sa.Connection]:
    """A copy in memory of a journal of an older `schema`, as it will be. The journal is only read."""
    with closing(sqlite3.connect(":memory:")) as memory:
        journal.backup(memory)
        engine = sa.create_engine("sqlite://", creator=lambda: memory, poolclass=sa.StaticPool)
        with in_one_transaction(engine) as connection:
            take_steps(connection, schema)
        with engine.connect() as connection:
            yield connection


def _durable(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0)
    connection.execute("PRAGMA synchronous=FULL")
    return connection
