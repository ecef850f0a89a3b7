"""The journal of a group, read by doctor: nothing is written, and no lead is needed."""

from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.condition import Condition, Corrupt, Missing, Newer, Sound, UnreadableJournal
from refitd.state.journal.leadership import read_leader
from refitd.state.journal.migrate import is_older
from refitd.state.journal.postgres import connect, schema_of, why_unusable
from refitd.state.journal.reads import read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError
from refitd.state.leader import Leader


@contextmanager
def reading_group(database: PostgresAddress) -> Generator[sa.Connection]:
    """A connection that cannot change the journal.

    Raises:
        psycopg.Error, sqlalchemy.exc.DBAPIError: the database does not answer, or refuses.
    """

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
            if is_older(schema):
                return UnreadableJournal(f"it has schema {schema}: the next leader brings it to {SCHEMA_VERSION}")
            origin = read_origin(connection) if schema else None
    except RecordDamagedError as error:
        return Corrupt(str(error))
    except (psycopg.Error, DBAPIError) as error:
        return UnreadableJournal(" ".join(str(getattr(error, "orig", None) or error).split()))
    return Missing() if origin is None else Sound(origin, schema)


def look_at_group(database: PostgresAddress) -> tuple[Leader | None, str | None]:
    """Who leads a group or led last, and why its database cannot hold a journal, None where it can.

    Raises:
        psycopg.Error: the database does not answer.
    """
    with connect(database) as connection:
        return read_leader(connection), why_unusable(connection)
