"""The journal's tables. What is queried has a column; the rest of a record is JSON beside it.

A record is JSON, a line feed, and a checksum of the JSON. SQLite finds damage to its own pages' structure; a byte that
flips inside a value looks like any other value to it. A journal that says "step 7" where "step 1" was written would be
believed, so each record proves itself.
"""

from typing import TypeVar

import msgspec
import sqlalchemy as sa
import xxhash
from sqlalchemy import event

from refitd_client.contract.decoding import from_json

SCHEMA_VERSION = 7  # with each change of what follows one more: a journal of another schema is rebuilt

metadata = sa.MetaData()

# In PostgreSQL an Integer has 32 bits; SQLite's has 64, and only one called Integer numbers rows by itself.
Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("generation", Number, nullable=False),
    sa.Column("step", Number, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("created_at", sa.Text, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Index("versions_by_run", "run", "generation", "step"),
    sa.Index("versions_by_state", "state", "created_at", "generation", "step", "run"),
    sa.Index("versions_newest", "created_at", "generation", "step", "run"),
)

engines = sa.Table(
    "engines",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("engine", sa.Text, nullable=False, index=True),
    sa.Column("version", sa.Text, nullable=False, index=True),
    sa.Column("outcome", sa.Text),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

# `attempts` is read in the order in which rows were written first: by SQLite's rowid, and in PostgreSQL by a column.
event.listen(
    attempts,
    "after_create",
    sa.DDL("ALTER TABLE attempts ADD COLUMN rowid bigint GENERATED ALWAYS AS IDENTITY UNIQUE").execute_if(
        dialect="postgresql"
    ),
)

fingerprints = sa.Table(
    "fingerprints",
    metadata,
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("configuration", sa.Text, primary_key=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

updates = sa.Table(
    "updates",
    metadata,
    sa.Column("number", Number, primary_key=True, autoincrement=False),
    sa.Column("run", sa.Text, nullable=False, index=True),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", Number, primary_key=True, autoincrement=False),
    sa.Column("subject", sa.Text, nullable=False, index=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

origin = sa.Table(
    "origin",
    metadata,
    sa.Column("id", Number, primary_key=True, autoincrement=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

RecordT = TypeVar("RecordT")

_SUM_LENGTH = 17  # a line feed and 16 hex digits of XXH3-64


class RecordDamagedError(Exception):
    """A record of the journal is not what was written there."""


def pack(record: object) -> bytes:
    data = msgspec.json.encode(record)
    return data + _sum(data)


def unpack(row: object, kind: type[RecordT]) -> RecordT:
    """The record that was written. A RecordDamagedError says that the bytes are others, or those of another kind."""
    if not isinstance(row, bytes):  # in SQLite a damaged column may hold anything
        raise RecordDamagedError(f"a record of {kind.__name__} is damaged: it is no record")
    data, found = row[:-_SUM_LENGTH], row[-_SUM_LENGTH:]
    if _sum(data) != found:
        raise RecordDamagedError(f"a record of {kind.__name__} is damaged: its checksum does not fit")
    try:
        return from_json(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordDamagedError(f"a record of {kind.__name__} cannot be read: {error}") from error


def _sum(data: bytes) -> bytes:
    return b"\n" + xxhash.xxh3_64_hexdigest(data).encode()
