"""A journal that is lost, corrupt, newer or unreadable: what the next start does about it."""

import os
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from refitd.clock import SystemClock
from refitd.root.ownership import StartRefusedError, mark_root, mounts_now
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import (
    SIDE_FILES,
    Corrupt,
    Missing,
    Newer,
    Sound,
    UnreadableJournal,
    examine_journal,
    last_state_folder,
    open_journal,
)
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd.state.records import NEW, Origin
from refitd.state.store import Store
from refitd_client.contract.states import EngineState
from support.journals import stored
from support.records import engine, version

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root on which a service has run, with a version in it."""
    root = tmp_path / "root"
    (root / "run" / "v000001").mkdir(parents=True)
    (root / ".refitd").mkdir()
    return root


async def filled(state: Path, root: Path) -> Path:
    """A journal with something in it, as a service leaves it; its path."""
    async with stored(open_journal(state, root)) as store:
        for step in range(1, 40):
            store.put_version(version(step), "sealed")
        store.put_engine(engine(serving=version(1).id), "added")
        store.record_fingerprint(version(1).id, "c", "f")
    return state / JOURNAL_NAME


def origin_of(journal: Journal) -> Origin | None:
    with closing(journal):
        return journal.read(rows.read_origin)


def scribble(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def header(path: Path) -> None:
    scribble(path, 0, b"not a database at all")


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def in_the_middle(path: Path) -> None:
    size = path.stat().st_size
    for at in range(8192, size, 4096):
        scribble(path, at, random.Random(at).randbytes(512))


def one_byte(path: Path) -> None:
    """A flipped byte inside a value: a database that is sound, with a fact that nobody wrote."""
    at = path.read_bytes().index(b'"digest":"digest-1-7"')
    scribble(path, at + len(b'"digest":"digest-1-'), b"9")


def another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE shopping (item TEXT)")


def start(state: Path, root: Path) -> str | None:
    """Start as a service does; why it refuses."""
    try:
        journal = open_journal(state, root)
    except StartRefusedError as error:
        return str(error)
    Store(journal, SystemClock())
    journal.close()
    return None


@pytest.mark.parametrize("spoil", [header, truncated, in_the_middle, one_byte, another_program])
async def test_a_corrupt_journal_is_moved_aside_and_one_begins_that_is_to_be_rebuilt(
    root: Path, state: Path, spoil: Callable[[Path], None]
) -> None:
    path = await filled(state, root)
    spoil(path)
    spoiled = path.read_bytes()
    assert isinstance(examine_journal(path, thorough=True), Corrupt)
    with capture_logs() as logs:
        origin = origin_of(open_journal(state, root))
    assert origin is not None
    assert (origin.lost, origin.rebuilt) == (True, False)
    assert "corrupt" in (origin.cause or "")
    assert path.with_name("journal.db.aside-1").read_bytes() == spoiled
    assert any(log["log_level"] == "error" and "bars, pins and pauses stand" in log["consequence"] for log in logs)


async def test_each_corrupt_journal_gets_a_name_of_its_own_and_takes_its_side_files_with_it(
    root: Path, state: Path
) -> None:
    for number in (1, 2):
        path = await filled(state, root)
        header(path)
        path.with_name("journal.db-wal").write_bytes(b"the last writes")
        open_journal(state, root).close()
        assert path.with_name(f"journal.db.aside-{number}-wal").read_bytes() == b"the last writes"


async def test_a_deleted_journal_is_rebuilt_because_the_root_knows_that_there_was_one(root: Path, state: Path) -> None:
    path = await filled(state, root)
    path.unlink()
    path.with_name("journal.db-wal").write_bytes(b"left behind")
    with capture_logs() as logs:
        origin = origin_of(open_journal(state, root))
    assert origin is not None
    assert (origin.lost, origin.rebuilt) == (True, False)
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["the journal was lost and is rebuilt"]
    assert path.with_name("journal.db.aside-1-wal").exists()  # SQLite would take it for the new journal's


async def test_a_kill_while_the_journal_is_rebuilt_leaves_it_to_be_rebuilt(root: Path, state: Path) -> None:
    path = await filled(state, root)
    path.unlink()
    open_journal(state, root).close()
    again = open_journal(state, root)
    assert origin_of(again) == origin_of(Journal(state))
    assert not Store(Journal(state), SystemClock()).origin.rebuilt


async def test_a_kill_while_a_journal_is_made_leaves_none(root: Path, state: Path) -> None:
    path = await filled(state, root)
    path.unlink()
    journal = Journal(state)
    journal.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM origin")  # it is what is written last
    assert examine_journal(path, thorough=False) == Missing()
    origin = origin_of(open_journal(state, root))
    assert origin is not None
    assert origin.lost


def test_a_first_start_on_a_new_root_rebuilds_nothing(tmp_path: Path, state: Path) -> None:
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    origin = origin_of(open_journal(state, root))
    assert origin is not None
    assert replace(origin, root=None) == NEW
    assert origin.root == mark_root(root, None, has_versions=True, mounts=mounts_now())
    assert last_state_folder(root) == state


def test_a_first_start_on_a_root_with_versions_collects_nothing_at_first_and_trusts_engines(
    root: Path, state: Path
) -> None:
    origin = origin_of(open_journal(state, root))
    assert origin is not None
    assert (origin.lost, origin.rebuilt) == (False, False)


async def test_a_journal_that_is_looked_for_in_the_wrong_place_is_not_rebuilt(
    root: Path, state: Path, tmp_path: Path
) -> None:
    await filled(state, root)
    with pytest.raises(StartRefusedError, match=f"start with --state {state}"):
        open_journal(tmp_path / "elsewhere", root)
    assert not (tmp_path / "elsewhere").exists()


async def test_a_journal_of_a_newer_refitd_is_refused_and_left_as_it_is(root: Path, state: Path) -> None:
    path = await filled(state, root)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    assert examine_journal(path, thorough=False) == Newer(SCHEMA_VERSION + 1)
    with pytest.raises(StartRefusedError, match=f"schema {SCHEMA_VERSION + 1}, and this refitd knows"):
        open_journal(state, root)
    assert path.read_bytes() == before


async def test_a_journal_that_another_process_has_locked_is_refused_and_not_taken_for_corrupt(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await filled(state, root)
    monkeypatch.setattr("refitd.state.journal.recovery._LOCKED_SECONDS", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("DELETE FROM events WHERE seq = 1")
        assert isinstance(examine_journal(path, thorough=False), UnreadableJournal)
        with pytest.raises(StartRefusedError, match="locked"):
            open_journal(state, root)
    assert path.exists()


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder, in a process without the rights of root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_a_read_only_state_folder_is_refused_with_a_sentence_and_can_still_be_looked_at(
    root: Path, nobody: Path
) -> None:
    state = nobody / "state"
    path = await filled(state, root)
    state.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        for file in state.iterdir():
            os.chown(file, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        assert isinstance(examine_journal(path, thorough=True), Sound)
        with pytest.raises(StartRefusedError, match="needs to write it and its folder"):
            open_journal(state, root)
    finally:
        os.seteuid(user)
        state.chmod(0o755)
    assert isinstance(examine_journal(path, thorough=True), Sound)


async def test_whatever_lies_in_the_journal_a_start_refuses_in_a_sentence_or_has_one_that_it_can_use(
    root: Path, state: Path
) -> None:
    path = await filled(state, root)
    good = path.read_bytes()
    for seed in range(25):
        chance, data = random.Random(seed), bytearray(good)
        for _ in range(chance.choice([1, 2, 5, 20])):
            at, length = chance.randrange(len(data)), chance.choice([1, 4, 64, 512])
            data[at : at + length] = chance.randbytes(min(length, len(data) - at))
        path.write_bytes(data)
        for side in SIDE_FILES:
            path.with_name(path.name + side).unlink(missing_ok=True)
        refusal = start(state, root)
        assert refusal is None or "schema" in refusal, seed


async def test_looking_at_a_journal_changes_nothing(root: Path, state: Path) -> None:
    path = await filled(state, root)
    before = path.read_bytes()
    examine_journal(path, thorough=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("pulls", "outcome", "state_then", "known", "unproven"),
    [
        (False, "TAINTED", EngineState.TAINTED, False, ("run~v000002",)),
        (True, "UNREACHABLE", EngineState.PROBING, True, ()),
    ],
)
async def test_a_load_in_which_the_service_died_leaves_an_engine_doubted_and_a_host_as_it_was(
    root: Path, state: Path, pulls: bool, outcome: str, state_then: EngineState, known: bool, unproven: tuple[str, ...]
) -> None:
    async with stored(open_journal(state, root)) as store:
        store.put_engine(engine(serving="run~v000001", pulls=pulls))
        store.open_attempt("a", "run~v000002")
    again = open_journal(state, root)
    found = Store(again, SystemClock()).engines["a"]
    again.close()
    assert found.trouble.last_attempt is not None
    assert (found.trouble.last_attempt.outcome, found.state, found.known) == (outcome, state_then, known)
    assert (found.debts.unproven, found.debts.resume_owed) == (unproven, not pulls)
    assert (found.serving, found.contents.held) == (("run~v000001", None) if pulls else (None, "run~v000001"))
