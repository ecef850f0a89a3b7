"""`refitd doctor` with --deep and --repair on a real root and a real journal: what it finds, mends and leaves alone."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from refitd.clock import SystemClock
from refitd.root.ownership import owned
from refitd.state.journal.recovery import open_journal
from refitd.state.journal.rows import put
from refitd.state.store import Store
from refitd_client.validation.examine import structure
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import open_group_journal
from refitd_hosts.group.leadership import Candidate
from support.checkpoints import publish, tensors
from support.command_line import refitd
from support.postgres import PostgresServer
from support.records import engine, version

STEPS = (1, 2, 3)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A root and a journal that agree about steps 1 to 3."""
    root = tmp_path / "root"
    for step in STEPS:
        publish(root, "run", step, tensors(step))
    with owned(root):
        write(tmp_path, _seal)
    return tmp_path


def write(job: Path, change: Callable[[Path, Store], None]) -> None:
    """Change the journal as a service would, and stop."""

    async def run() -> None:
        journal = open_journal(job / "state", job / "root")
        store = Store(journal, SystemClock())
        change(job / "root", store)
        writing = asyncio.create_task(journal.run())
        await store.durable()
        writing.cancel()
        await asyncio.wait({writing})
        journal.close()

    asyncio.run(run())


def _seal(root: Path, store: Store) -> None:
    for step in STEPS:
        seen = structure(root, f"run/v{step:06d}")
        assert seen.manifest is not None
        store.put_version(version(step, signature=seen.signature, digest=seen.manifest.digest, owned=True), "sealed")
    store.put_engine(engine(serving=version(3).id))
    store.rebuilt()


def read(job: Path) -> Store:
    """What a service would find in the journal."""
    journal = open_journal(job / "state", job / "root")
    store = Store(journal, SystemClock())
    journal.close()
    return store


def examined(job: Path, *flags: str, state: str = "state") -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and what was found of the root's name, the journal and the versions, but for what is in order."""
    places = ["--root", str(job / "root"), "--state", str(job / state)]
    result = refitd("doctor", *places, *flags, "--json")
    findings = msgspec.json.decode(result.stdout)["findings"]
    looked_at = {"root", "journal", "versions"}
    return result.exit_code, [each for each in findings if each["check"] in looked_at and each["verdict"] != "ok"]


def v(job: Path, step: int) -> Path:
    return job / "root" / "run" / f"v{step:06d}"


def flip(folder: Path) -> None:
    """Flip a byte in place, and put the file's time back."""
    shard = next(folder.glob("*.safetensors"))
    before, data = shard.stat(), bytearray(shard.read_bytes())
    data[-1] ^= 1
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_nothing_is_found_where_journal_and_root_agree(job: Path) -> None:
    assert examined(job, "--deep", "--repair") == (0, [])


def test_a_flipped_byte_is_found_by_reading_every_byte(job: Path) -> None:
    flip(v(job, 2))
    assert examined(job) == (0, []), "without a trace: only who reads it sees that"
    code, (found,) = examined(job, "--deep", "--repair")
    assert (code, found["check"], found["verdict"], found["subject"]) == (1, "versions", "failed", version(2).id)
    assert "move its folder away" in found["fix"]
    assert all(v(job, step).exists() for step in STEPS)


def test_what_looks_otherwise_than_it_did_is_left_to_the_service_which_reads_it_again(job: Path) -> None:
    next(v(job, 1).glob("*.safetensors")).write_bytes(b"other")
    shutil.rmtree(v(job, 2))
    assert examined(job, "--deep") == (0, [])


def test_a_corrupt_journal(job: Path) -> None:
    path, garbage = job / "state" / "journal.db", b"no database, by no means" * 1000
    path.write_bytes(garbage)
    code, (found,) = examined(job)
    assert (code, found["check"], found["verdict"]) == (1, "journal", "failed")
    assert "bars, pins and pauses stand" in found["fix"]
    assert path.read_bytes() == garbage, "who looks changes nothing"
    assert examined(job, "--repair")[1] == [found], "a start does that by itself"
    assert path.read_bytes() == garbage
    origin = read(job).origin
    assert (origin.lost, origin.rebuilt) == (True, False)
    (found,) = examined(job)[1]
    assert (found["verdict"], "rebuilds it" in found["text"]) == ("warning", True)
    assert path.with_name("journal.db.aside-1").read_bytes() == garbage
    assert all(v(job, step).exists() for step in STEPS)


def test_a_damaged_entry_of_the_log_is_named_and_hinders_no_start(job: Path) -> None:
    path = job / "state" / "journal.db"
    with closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE events SET record = x'7b7d' WHERE seq = 1")
    assert set(read(job).versions) == {version(step).id for step in STEPS}
    assert [path.name for path in path.parent.glob("*.aside-*")] == []
    assert [found["verdict"] for found in examined(job)[1]] == ["failed"]


def test_a_journal_that_is_gone_is_told_from_one_that_never_was(job: Path) -> None:
    (job / "state" / "journal.db").unlink()
    code, (found,) = examined(job)
    assert (code, found["verdict"]) == (0, "warning")
    assert "a service has run on this root before" in found["text"]


@pytest.mark.parametrize("note", [None, "postgresql:group"])
def test_a_journal_that_lies_elsewhere_is_named(job: Path, note: str | None) -> None:
    if note is not None:
        (job / "root" / ".refitd" / "journal").write_text(note)
    (found,) = examined(job, state="other")[1]
    assert f"lies in {note or job / 'state'}" in found["text"]
    assert not (job / "other").exists()


def test_a_root_that_was_emptied_is_named_and_a_repair_takes_it_also_under_a_running_service(job: Path) -> None:
    root = job / "root"
    name = (root / ".refitd" / "id").read_text()
    with owned(root):
        shutil.rmtree(root)
        root.mkdir()
        code, (found,) = examined(job)
        assert (code, found["check"], found["verdict"]) == (1, "root", "failed")
        assert "its file system may be unmounted" in found["text"]
        assert list(root.iterdir()) == [], "who looks leaves nothing"
        assert examined(job, "--repair") == (0, [])
    assert (root / ".refitd" / "id").read_text() == name


def test_the_root_of_another_service_is_no_one_else_s_by_a_repair(job: Path) -> None:
    (job / "root" / ".refitd" / "id").write_text("another\n")
    code, found = examined(job, "--repair")
    assert (code, [each["verdict"] for each in found]) == (1, ["failed", "failed"])
    assert "another service's root" in found[0]["text"]
    assert (job / "root" / ".refitd" / "id").read_text() == "another\n"


def test_a_root_is_taken_as_it_is_by_a_journal_that_knows_no_versions(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    open_journal(tmp_path / "state", root).close()
    shutil.rmtree(root)
    root.mkdir()
    assert [found for found in examined(tmp_path)[1] if found["check"] == "root"] == []


def test_a_damaged_record_of_a_group_is_named_and_left_for_the_backup(tmp_path: Path, postgres: PostgresServer) -> None:
    root, database = tmp_path / "root", PostgresAddress(postgres.database())
    (root / ".refitd").mkdir(parents=True)
    lead = Candidate(database, "http://hub:8700", 60.0).try_to_lead([].append)
    assert lead is not None
    journal = open_group_journal(database, lead, root)
    journal.write_now([put(version(1))])
    journal.close()
    lead.release()
    with psycopg.connect(database.uri, autocommit=True) as connection:
        connection.execute("UPDATE versions SET record = '\\x7b7d'")
    result = refitd("doctor", "--root", str(root), "--state", database.uri, "--repair", "--json")
    (found,) = [
        each
        for each in msgspec.json.decode(result.stdout)["findings"]
        if (each["check"], each["verdict"]) == ("journal", "failed")
    ]
    assert result.exit_code == 1
    assert "restore the database from its backup" in found["fix"]
    with psycopg.connect(database.uri) as connection:
        assert connection.execute("SELECT epoch FROM leadership").fetchall() == [(1,)], "no lead is taken"
