"""Where journals are kept in tests: in a file, and in a real PostgreSQL."""

from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.state.journal.database import JournalDatabase
from refitd_hosts.group.journal import PostgresDatabase
from refitd_hosts.group.leadership import HeldLead

Place = Callable[[], Path | JournalDatabase]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where the journal of a service is to be."""
    return tmp_path / "state"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a journal is opened, again and again with what was written to it."""
    if request.param == "sqlite":
        return lambda: tmp_path
    database, take = request.getfixturevalue("database"), request.getfixturevalue("led")
    lead: HeldLead = take()
    return lambda: PostgresDatabase(database, lead)
