"""Each version has a place in lists over all runs (`state/version_index.py`), and runs can be closed.

Rows of versions keep the order in which they were written first: that is the order of the first sight.
"""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Make room for both. A journal that was killed while it was made may have no table of versions."""
    op.create_table(
        "runs",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    if "versions" in sa.inspect(op.get_bind()).get_table_names():
        _add_places()


def _add_places() -> None:
    op.add_column("versions", sa.Column("place", sa.Integer, nullable=False, server_default="0"))
    _give_places()
    for index in ("versions_by_order", "versions_by_state", "versions_newest"):
        op.drop_index(index, "versions")
    op.create_index("versions_by_run", "versions", ["run", "place", "generation", "step"])
    op.create_index("versions_by_state", "versions", ["state", "place", "generation", "step"])
    op.create_index("versions_newest", "versions", ["place", "generation", "step"])


def _give_places() -> None:
    """From each run's newest version back: a row's own number, or the place of the next one where that is smaller."""
    connection = op.get_bind()
    newest_first = "SELECT rowid, run FROM versions ORDER BY run, generation DESC, step DESC"
    places: list[dict[str, int]] = []
    last, place = None, 0
    for row, run in connection.exec_driver_sql(newest_first).all():
        place = row if run != last else min(row, place)
        last = run
        places.append({"row": row, "place": place})
    if places:
        connection.execute(sa.text("UPDATE versions SET place = :place WHERE rowid = :row"), places)
