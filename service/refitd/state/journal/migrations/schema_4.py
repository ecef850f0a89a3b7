"""Webhooks are gone."""

from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Drop their table."""
    op.drop_table("deliveries")
