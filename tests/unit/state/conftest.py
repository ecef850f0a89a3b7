"""Where journals are kept in tests: in a file, and in a real PostgreSQL."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.database import JournalDatabase
from refitd.state.journal.leadership import Candidate, HeldLead
from refitd.state.journal.postgres import PostgresDatabase
from support.postgres import PostgresServer

Place = Callable[[], Path | JournalDatabase]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where the journal of a service is to be."""
    return tmp_path / "state"


@pytest.fixture
def database(postgres: PostgresServer) -> PostgresAddress:
    """A new, empty database."""
    return PostgresAddress(postgres.database())


@pytest.fixture
def led(database: PostgresAddress) -> Generator[Callable[..., HeldLead]]:
    """Takes the lead of a group on the database, as another process would. What was lost is in the list given."""
    with ExitStack() as held:

        def take(lost: list[str] | None = None, lease: float = 60.0) -> HeldLead:
            candidate = Candidate(database, "http://hub:8700", lease)
            held.callback(candidate.close)
            lead = candidate.try_to_lead([].append if lost is None else lost.append)
            assert lead is not None
            held.callback(lead.release)
            return lead

        yield take


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a journal is opened, again and again with what was written to it."""
    if request.param == "sqlite":
        return lambda: tmp_path
    database, take = request.getfixturevalue("database"), request.getfixturevalue("led")
    lead: HeldLead = take()
    return lambda: PostgresDatabase(database, lead)
