"""A journal in a PostgreSQL database, which a group of services shares. Only the one that leads writes to it."""

import psycopg
import sqlalchemy as sa

from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.leadership import HeldLead, patient
from refitd.state.journal.migrate import MigrationError, is_older, take_steps
from refitd.state.journal.reads import read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, metadata
from refitd.state.journal.writes import put_origin
from refitd.state.records import Origin

OLDEST = 140000  # PostgreSQL 14: the first that ends a session which says nothing


class DatabaseRefusedError(Exception):
    """The database cannot hold a group's journal. The message says why and what to do."""


def connect(database: PostgresAddress, idle_milliseconds: int = 0) -> psycopg.Connection:
    """Open a connection whose commits are on disk when they return.

    Args:
        database: which.
        idle_milliseconds: after which a transaction that does nothing is ended by the server; 0 for never.

    Raises:
        psycopg.Error: the database does not answer, or refuses.
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
        """See `JournalDatabase`. An older refitd's tables are brought to this one's schema in the same transaction.

        Raises:
            DatabaseRefusedError: the tables are those of a newer refitd, or of another program.
        """
        with self.engine.begin() as connection:
            self._lead.check(connection)
            schema = schema_of(connection)
            if schema > SCHEMA_VERSION:
                raise DatabaseRefusedError(
                    f"the journal {self.name} has schema {schema}, and this refitd knows {SCHEMA_VERSION}: "
                    "start the newer refitd that wrote it"
                )
            if schema == 0 and (foreign := _named_as_ours(connection)):
                raise DatabaseRefusedError(
                    f"the database {self.name} has a table {min(foreign)} that no refitd has made: give refitd a "
                    "database of its own"
                )
            if is_older(schema):
                try:
                    take_steps(connection, schema)
                except MigrationError as error:
                    raise DatabaseRefusedError(
                        f"the journal {self.name} has schema {schema} and cannot be brought to {SCHEMA_VERSION}: "
                        f"{error}; it is as it was, and the refitd that wrote it can go on with it"
                    ) from error
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


def _named_as_ours(connection: sa.Connection) -> set[str]:
    return set(metadata.tables) & set(sa.inspect(connection).get_table_names())
