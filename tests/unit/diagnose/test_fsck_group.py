"""`refitd fsck` on a group's journal in PostgreSQL: repairs take the lead, and none is made while a service leads."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from typer.testing import Result

from refitd.clock import SystemClock
from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.group_journal import open_group_journal
from refitd.state.journal.group_reading import reading_group
from refitd.state.journal.leadership import Candidate
from refitd.state.journal.reads import read_versions
from refitd.state.store import Store
from refitd_client.contract.states import VersionState
from refitd_client.validation.examine import structure
from support.checkpoints import publish, tensors
from support.command_line import refitd
from support.postgres import PostgresServer
from support.records import version


@pytest.fixture
def database(postgres: PostgresServer) -> PostgresAddress:
    return PostgresAddress(postgres.database())


@pytest.fixture
def root(tmp_path: Path, database: PostgresAddress) -> Path:
    """A root and a group's journal that agree about steps 1 and 2."""
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    for step in (1, 2):
        publish(root, "run", step, tensors(step))

    async def run() -> None:
        candidate = Candidate(database, "http://hub:8700", 60.0)
        lead = candidate.try_to_lead([].append)
        assert lead is not None
        journal = open_group_journal(database, lead, root)
        store = Store(journal, SystemClock(), lead.epoch)
        for step in (1, 2):
            seen = structure(root, f"run/v{step:06d}")
            assert seen.manifest is not None
            record = version(step, signature=seen.signature, digest=seen.manifest.digest, owned=True)
            store.put_version(record, "sealed")
        store.rebuilt()
        writing = asyncio.create_task(journal.run())
        await store.durable()
        writing.cancel()
        await asyncio.wait({writing})
        journal.close()
        lead.release()

    asyncio.run(run())
    return root


@pytest.fixture
def fsck(root: Path, database: PostgresAddress) -> Callable[..., Result]:
    return lambda *flags: refitd("fsck", "--root", str(root), "--state", database.uri, "--no-engines", *flags)


def findings(result: Result) -> list[tuple[str, Any]]:
    found = msgspec.json.decode(result.stdout)["findings"]
    return [(finding["kind"], finding.get("repaired")) for finding in found]


def states(database: PostgresAddress) -> dict[int, VersionState]:
    with reading_group(database) as connection:
        return {found.order.step: found.state for found in read_versions(connection)}


def epoch(database: PostgresAddress) -> int:
    with psycopg.connect(database.uri) as connection:
        ((found,),) = connection.execute("SELECT epoch FROM leadership").fetchall()
    return found


def test_a_repair_takes_the_lead_and_gives_it_back(
    root: Path, database: PostgresAddress, fsck: Callable[..., Result]
) -> None:
    shutil.rmtree(root / "run" / "v000001")
    assert findings(fsck("--json")) == [("version-gone", False)]
    assert epoch(database) == 1, "a look takes no lead"
    assert findings(fsck("--repair", "--json")) == [("version-gone", True)]
    assert states(database) == {1: VersionState.LOST, 2: VersionState.SEALED}
    assert epoch(database) == 2
    assert findings(fsck("--repair", "--json")) == []


def test_nothing_is_repaired_while_a_service_leads_and_it_is_named(
    root: Path, database: PostgresAddress, fsck: Callable[..., Result]
) -> None:
    shutil.rmtree(root / "run" / "v000001")
    lead = Candidate(database, "http://hub-2:8700", 60.0).try_to_lead([].append)
    assert lead is not None
    try:
        result = fsck("--repair")
        assert result.exit_code == 1
        assert "http://hub-2:8700 leads the group" in result.stderr
        assert "stop all its services" in result.stderr
        assert states(database)[1] is VersionState.SEALED
    finally:
        lead.release()


def test_a_damaged_record_is_named_and_left_for_the_backup(
    root: Path, database: PostgresAddress, fsck: Callable[..., Result]
) -> None:
    with psycopg.connect(database.uri, autocommit=True) as connection:
        connection.execute("UPDATE versions SET record = '\\x7b7d' WHERE step = 1")
    result = fsck("--repair", "--json")
    assert result.exit_code == 1
    corrupt = [each for each in msgspec.json.decode(result.stdout)["findings"] if each["kind"] == "journal-corrupt"]
    assert [each.get("repair") for each in corrupt] == [None]
    assert "restore the database from its backup" in corrupt[0]["advice"]
    assert epoch(database) == 1


def test_a_database_that_is_away_is_said(
    root: Path, database: PostgresAddress, fsck: Callable[..., Result], postgres: PostgresServer
) -> None:
    postgres.kill()
    try:
        result = fsck("--repair", "--json")
    finally:
        postgres.start()
    assert findings(result)[0][0] == "journal-unreadable"
    assert result.exit_code == 1
