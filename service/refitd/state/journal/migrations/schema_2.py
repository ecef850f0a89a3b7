"""Every journal has an origin and webhooks, and every record its checksum.

Before there were migrations these came one by one without another number: a journal of schema 1 has none of them, an
origin and checksums, or all.
"""

import sqlalchemy as sa
import xxhash
from alembic import op

revision = "2"
down_revision = "1"

_WITH_RECORDS = ("versions", "engines", "attempts", "rollouts", "events")
_ORIGIN = b'{"cause":null,"lost":false,"rebuilt":true,"root":null}'


def upgrade() -> None:
    """Add what is missing."""
    there = sa.inspect(op.get_bind()).get_table_names()
    if "origin" not in there:
        _add_origin([table for table in _WITH_RECORDS if table in there])
    if "deliveries" not in there:
        op.create_table(
            "deliveries",
            sa.Column("number", sa.Integer, primary_key=True),
            sa.Column("id", sa.Text, nullable=False, unique=True),
            sa.Column("state", sa.Text, nullable=False, index=True),
            sa.Column("record", sa.LargeBinary, nullable=False),
        )


def _add_origin(tables: list[str]) -> None:
    op.create_table(
        "origin",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    if sum(_add_checksums(table) for table in tables):  # without a row it was never used, and has no origin
        insert = sa.text("INSERT INTO origin (id, record) VALUES (1, :record)")
        op.get_bind().execute(insert, {"record": _with_checksum(_ORIGIN)})


def _add_checksums(table: str) -> int:
    """Give each record of a table its checksum; return how many there are."""
    rows = op.get_bind().exec_driver_sql(f"SELECT rowid, record FROM {table}").all()  # noqa: S608 - a name from above
    change = sa.text(f"UPDATE {table} SET record = :record WHERE rowid = :row")  # noqa: S608 - a name from above
    for row, record in rows:
        op.get_bind().execute(change, {"row": row, "record": _with_checksum(record)})
    return len(rows)


def _with_checksum(data: bytes) -> bytes:
    return data + b"\n" + xxhash.xxh3_64_hexdigest(data).encode()
