"""A journal of an older refitd: brought to this one's schema with all that it knew, or left as it was."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from refitd.api.history import PastUpdates
from refitd.clock import SystemClock
from refitd.diagnose.doctor.finding import CheckVerdict
from refitd.diagnose.doctor.service import judge_service
from refitd.diagnose.journal import read_journal
from refitd.policy.hosts import refusal_of
from refitd.root.ownership import StartRefusedError
from refitd.settings import Settings
from refitd.state.journal import migrate as migrating
from refitd.state.journal import reads, writes
from refitd.state.journal.condition import Missing, Sound, UnreadableJournal, examine_journal
from refitd.state.journal.copies import KEPT, copy_of, drop_old_copies, keep_copy
from refitd.state.journal.journal import Journal
from refitd.state.journal.migrate import MIGRATIONS, in_one_transaction, migrate, take_steps
from refitd.state.journal.recovery import open_journal
from refitd.state.journal.schema import SCHEMA_VERSION, metadata, pack
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from refitd.state.store import Store
from refitd_client.contract.follow import HostReply
from refitd_client.contract.states import EngineState, VersionState
from support.journals import OLD, dump, old_journal, schema_of, shape
from support.records import version

SQLITES = {"journal.db", "journal.db-wal", "journal.db-shm"}


def made_by_steps(path: Path) -> None:
    """A journal that took every step there is, from nothing."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    with in_one_transaction(engine) as connection:
        take_steps(connection, 0)


def test_the_end_of_the_migrations_is_what_a_new_journal_begins_with(tmp_path: Path) -> None:
    stepped = tmp_path / "stepped.db"
    made_by_steps(stepped)
    new = Journal(tmp_path / "new")
    new.close()
    assert shape(stepped) == shape(tmp_path / "new" / JOURNAL_NAME)
    assert dump(stepped)[0] == dump(tmp_path / "new" / JOURNAL_NAME)[0] == f"schema {SCHEMA_VERSION}"


@pytest.mark.parametrize("name", [*OLD, None])
def test_what_alembic_would_generate_is_nothing(name: str | None, state: Path) -> None:
    """It compares types and columns with the tables that the code reads and writes by."""
    if name is None:
        state.mkdir()
        path = state / "journal.db"
        made_by_steps(path)
    else:
        path = old_journal(name, state)
        migrate(path, schema_of(name))
    with sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []


def test_each_schema_has_its_step_and_they_are_one_line() -> None:
    names = {f"schema_{number}.py" for number in range(1, SCHEMA_VERSION + 1)}
    assert {file.name for file in MIGRATIONS.glob("schema_*.py")} == names


@pytest.mark.parametrize("name", OLD)
async def test_versions_pins_rollbacks_engines_and_the_log_come_through_a_migration(
    name: str, root: Path, state: Path
) -> None:
    path = old_journal(name, state)
    before = dump(path)
    store = Store(open_journal(state, root), SystemClock())
    states = {version.order.step: version.state for version in store.versions.values()}
    sealed = dict.fromkeys((2, 3, 4, 6), VersionState.SEALED)
    assert states == sealed | {5: VersionState.REJECTED}
    assert store.gone == {"run~v000001"}
    assert [version.id for version in store.versions.values() if version.pinned] == ["run~v000002"]
    assert store.versions["run~v000006"].barred
    assert store.updates["run"].version == "run~v000004"
    assert store.engines["a:1"].serving == "run~v000004"
    assert store.engines["b:1"].state is EngineState.TAINTED, "a load had begun, and nobody knows how it ended"
    log = store.journal.read(lambda connection: reads.read_events(connection, after=0, limit=1000))
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    assert log[-1].text.startswith("rollout 6 to run~v000004: COMPLETE")
    store.journal.close()
    assert dump(copy_of(path, schema_of(name))) == before, "the copy is what the journal was"


@pytest.mark.parametrize("name", OLD)
def test_past_updates_are_read_from_a_journal_of_each_schema_there_ever_was(name: str, root: Path, state: Path) -> None:
    old_journal(name, state)
    journal = open_journal(state, root)
    updates, complete = journal.read(lambda connection: PastUpdates().read(connection, None, 1000, ()))
    journal.close()
    assert complete
    assert sorted(update.step for update in updates) == [1, 2, 3, 4, 5, 6], "the deleted one as well"
    assert sum(update.loads for update in updates) >= 1
    assert all(update.density is None and update.why_full is None for update in updates)


@pytest.mark.parametrize("name", OLD)
def test_a_migrated_journal_has_the_shape_of_a_new_one_and_is_sound_to_its_last_record(
    name: str, root: Path, state: Path, tmp_path: Path
) -> None:
    path = old_journal(name, state)
    open_journal(state, root).close()
    new = Journal(tmp_path / "new")
    new.close()
    assert shape(path) == shape(tmp_path / "new" / JOURNAL_NAME)
    condition = examine_journal(path, thorough=True)
    assert isinstance(condition, Sound)
    assert condition.schema == SCHEMA_VERSION
    assert (condition.origin.lost, condition.origin.rebuilt) == (False, True)


@pytest.mark.parametrize("name", OLD)
def test_doctor_reads_an_older_journal_without_changing_it(name: str, root: Path, state: Path) -> None:
    path = old_journal(name, state)
    before = path.read_bytes()
    facts = read_journal(Settings(root=root, state=state), root)
    assert isinstance(facts.condition, Sound)
    assert facts.condition.schema == schema_of(name)
    assert set(facts.engines) == {"a:1", "b:1"}
    finding = next(
        found for found in judge_service(Settings(root=root, state=state), facts, None) if found.check == "journal"
    )
    assert finding.verdict is CheckVerdict.OK
    assert f"schema {schema_of(name)}; the next start brings it to schema {SCHEMA_VERSION}" in finding.text
    assert path.read_bytes() == before


def test_doctor_says_the_schema_of_a_journal(root: Path, state: Path) -> None:
    Journal(state).close()
    found = judge_service(Settings(root=root, state=state), read_journal(Settings(root=root, state=state), root), None)
    assert any(f"schema {SCHEMA_VERSION}" in finding.text for finding in found)


def test_a_start_on_a_journal_of_this_schema_copies_nothing(root: Path, state: Path) -> None:
    open_journal(state, root).close()
    open_journal(state, root).close()
    assert [file.name for file in state.iterdir() if "schema" in file.name] == []


def spoiled_step(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Replace the last step by one that does something, and more."""
    for number in range(1, SCHEMA_VERSION):
        shutil.copy(MIGRATIONS / f"schema_{number}.py", folder)
    numbers = f"revision, down_revision = '{SCHEMA_VERSION}', '{SCHEMA_VERSION - 1}'"
    head = f"import sqlalchemy as sa\nfrom alembic import op\n{numbers}\ndef upgrade():\n"
    begins = "    op.create_table('half', sa.Column('id', sa.Integer))\n    op.execute('DELETE FROM versions')\n"
    (folder / f"schema_{SCHEMA_VERSION}.py").write_text(f"{head}{begins}    {text}\n")
    monkeypatch.setattr(migrating, "MIGRATIONS", folder)


@pytest.mark.parametrize("text", ["raise KeyError('digest')", "op.execute('SELECT nothing FROM nowhere')"])
def test_a_step_that_fails_leaves_the_journal_as_it_was_and_is_no_reason_to_begin_a_new_one(
    text: str, root: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_journal("schema-1-webhooks", state)
    before = dump(path)
    (tmp_path / "steps").mkdir()
    spoiled_step(tmp_path / "steps", monkeypatch, text)
    assert isinstance(examine_journal(path, thorough=True), UnreadableJournal)
    with pytest.raises(StartRefusedError, match=f"the step to schema {SCHEMA_VERSION} fails"):
        open_journal(state, root)
    with pytest.raises(migrating.MigrationError):
        migrate(path, 1)
    assert dump(path) == before
    assert not list(state.glob("*corrupt*"))


def test_a_copy_that_finds_no_room_stops_the_start_and_leaves_nothing_behind(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_journal("schema-1-webhooks", state)
    before = dump(path)

    def full(_: Path, to: Path) -> None:
        to.write_bytes(b"half")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("refitd.state.journal.copies._copy", full)
    refused = rf"cannot be brought to {SCHEMA_VERSION}.*disk is full.*it is as it was"
    with pytest.raises(StartRefusedError, match=refused):
        open_journal(state, root)
    assert dump(path) == before
    assert not list(state.glob("*schema-1*"))


def test_a_copy_that_was_left_unfinished_is_written_anew(root: Path, state: Path) -> None:
    path = old_journal("schema-1-origin", state)
    before = dump(path)
    unfinished = state / "journal.db.schema-1.unfinished"
    unfinished.write_bytes(b"half a copy")
    open_journal(state, root).close()
    assert dump(copy_of(path, 1)) == before
    assert not unfinished.exists()


def test_copies_of_the_newest_schemas_stay_and_nothing_else_is_touched(state: Path) -> None:
    path = old_journal("schema-1-origin", state)
    others = ["journal.db.schema-x", "journal.db.schema-2.mine", "journal.db.corrupt-1", "notes.schema-1"]
    for name in others:
        (state / name).write_text("somebody's")
    for schema in (2, 9, 10, 11):
        keep_copy(path, schema)
        drop_old_copies(path)
    copies = {f"journal.db.schema-{schema}" for schema in (10, 11)}
    assert len(copies) == KEPT
    assert {file.name for file in state.iterdir() if file.name not in SQLITES} == {*copies, *others}


def test_a_newer_journal_is_refused_and_the_way_back_is_named(root: Path, state: Path) -> None:
    path = old_journal("schema-1-webhooks", state)
    open_journal(state, root).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    keep_copy(path, SCHEMA_VERSION)
    before = dump(path)
    with pytest.raises(StartRefusedError, match=rf"go back.*move .*\* away, and .*schema-{SCHEMA_VERSION} to"):
        open_journal(state, root)
    assert dump(path) == before


def test_an_older_journal_that_was_killed_while_it_was_made_is_moved_aside(root: Path, state: Path) -> None:
    state.mkdir()
    path = state / "journal.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=1")
        connection.execute("CREATE TABLE engines (id TEXT PRIMARY KEY, record BLOB NOT NULL)")
    assert examine_journal(path, thorough=False) == Missing(leftovers=True)
    open_journal(state, root).close()
    assert isinstance(examine_journal(path, thorough=True), Sound)


async def test_what_is_written_after_a_migration_is_found_again(root: Path, state: Path) -> None:
    old_journal("schema-1-first", state)
    journal = open_journal(state, root)
    assert journal._commit([writes.put_version(version(7), 7)]) is None
    journal.close()
    store = Store(open_journal(state, root), SystemClock())
    assert version(7).id in store.versions
    store.journal.close()


def test_a_host_knows_after_an_upgrade_which_epochs_it_has_heard(root: Path, state: Path) -> None:
    """Until schema 4 they were written with each run: a hub whose lead is over would be obeyed once more."""
    path = old_journal("schema-3", state)
    old = {"run": {"leads": True, "leader": "group", "fence": 7, "told_by": "the refitd of /root on b", "orders": 9}}
    old["before"] = old["run"] | {"leader": "hub", "fence": 2, "orders": 4}
    old["older"] = old["run"] | {"fence": 3, "orders": 5}
    with closing(sqlite3.connect(path)) as connection:
        for run, lead in old.items():
            connection.execute("INSERT INTO runs VALUES (?, ?)", (run, pack({"run": run, "lead": lead})))
        connection.commit()
    store = Store(open_journal(state, root), SystemClock())
    lead = store.origin.lead
    assert (lead.leader, lead.fence, lead.heard) == ("group", 7, {"hub": 2, "group": 7})
    stale = HostReply(lease_seconds=30.0, serve={"run": "run~v000001"}, leader="group", epoch=6)
    assert "epoch 7" in (refusal_of(stale, lead, "the hub") or "")
    store.journal.close()


def test_versions_of_an_older_journal_stand_in_lists_by_when_they_were_first_seen(root: Path, state: Path) -> None:
    path = old_journal("schema-2", state)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM versions")
        for run, step in (("old", 100), ("new", 1), ("old", 102), ("new", 2), ("old", 101)):
            record = version(step, run=run)
            row = (record.id, run, 1, step, record.state.value, pack(record))
            connection.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)", row)
    journal = open_journal(state, root)
    found = [record.id for record in journal.read(reads.read_versions)]
    assert found == ["new~v000002", "old~v000102", "old~v000101", "new~v000001", "old~v000100"]
    journal.close()
