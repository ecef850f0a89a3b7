"""The journal's tables. What is queried has a column; the rest of a record is JSON beside it."""

import sqlalchemy as sa

SCHEMA_VERSION = 3  # with each change of what follows one more, and a step to it in migrations/

metadata = sa.MetaData()

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("place", sa.Integer, nullable=False, server_default="0"),
    sa.Index("versions_by_run", "run", "place", "generation", "step"),
    sa.Index("versions_by_state", "state", "place", "generation", "step"),
    sa.Index("versions_newest", "place", "generation", "step"),
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
fingerprints = sa.Table(
    "fingerprints",
    metadata,
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("configuration", sa.Text, primary_key=True),
    sa.Column("fingerprint", sa.Text, nullable=False),
)
rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
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
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subject", sa.Text, nullable=False, index=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)
deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)
origin = sa.Table(
    "origin",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
)
