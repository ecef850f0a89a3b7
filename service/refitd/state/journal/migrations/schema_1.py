"""The tables that refitd began with."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make them."""
    _versions()
    op.create_table(
        "engines",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("engine", sa.Text, nullable=False, index=True),
        sa.Column("version", sa.Text, nullable=False, index=True),
        sa.Column("outcome", sa.Text),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "fingerprints",
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("configuration", sa.Text, primary_key=True),
        sa.Column("fingerprint", sa.Text, nullable=False),
    )
    _books()


def _versions() -> None:
    op.create_table(
        "versions",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("versions_by_order", "versions", ["run", "generation", "step"])
    op.create_index("versions_by_state", "versions", ["state", "generation", "step"])
    op.create_index("versions_newest", "versions", ["generation", "step", "id"])


def _books() -> None:
    op.create_table(
        "rollouts",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("run", sa.Text, nullable=False, index=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("subject", sa.Text, nullable=False, index=True),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
