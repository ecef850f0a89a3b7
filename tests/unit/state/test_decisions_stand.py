"""A journal that is damaged: it is rebuilt, and what was decided stands whatever becomes of it."""

import asyncio
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.root.ownership import StartRefusedError
from refitd.state.decisions import DecisionFile, decisions_path, read_decisions
from refitd.state.journal import recovery, rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import open_journal
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd.state.records import UNLED, HostLead
from refitd.state.store import Store
from refitd_client.contract.states import VersionState
from support.records import engine, version

BARRED, PINNED, OTHER = (version(step).id for step in (9, 3, 5))


async def in_line(_: str, call: Callable[[], None]) -> None:
    call()


async def used(state: Path, root: Path, lead: HostLead = UNLED) -> Path:
    """A journal of a service whose operator has barred a version, pinned one, paused the run, and closed another."""
    journal = open_journal(state, root)
    store = Store(journal, SystemClock())
    decisions = DecisionFile(store, root, in_line)
    store.observe(decisions)
    writing = [asyncio.create_task(task()) for task in (journal.run, decisions.run)]
    for step in range(1, 30):
        id_ = version(step).id
        store.put_version(
            version(step, barred=id_ == BARRED, pinned=id_ == PINNED, metadata={"x": "y" * 500}), "sealed"
        )
    store.put_engine(engine(serving=OTHER), "added")
    store.record_fingerprint(OTHER, "configuration", "fingerprint")
    store.pause_updates(store.start_update("run", OTHER, "it is the newest"), paused=True)
    store.put_version(version(1, run="old"), "sealed")
    store.close_run("old")
    store.put_lead(lead, None)
    await decisions.written()
    for task in writing:
        task.cancel()
    await asyncio.wait(writing)
    journal.close()
    return state / JOURNAL_NAME


def opened(state: Path, root: Path) -> Store:
    journal = open_journal(state, root)
    store = Store(journal, SystemClock())
    journal.close()
    return store


def assert_decisions_stand(store: Store) -> None:
    assert [id_ for id_, each in store.versions.items() if each.barred] == [BARRED]
    assert [id_ for id_, each in store.versions.items() if each.pinned] == [PINNED]
    assert store.updates["run"].paused_since is not None
    assert set(store.runs.closed) == {"old"}


def rewrite(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount == 1


async def test_a_journal_with_one_bad_row_is_rebuilt_from_what_was_decided(root: Path, state: Path) -> None:
    path = await used(state, root)
    with closing(sqlite3.connect(path)) as connection:
        entries = connection.execute("SELECT count(*) FROM events").fetchone()[0]
    rewrite(path, "UPDATE versions SET record = replace(record, 'digest-1-5', 'digest-1-4') WHERE id = ?", OTHER)
    store = opened(state, root)
    assert_decisions_stand(store)
    assert set(store.versions) == {BARRED, PINNED}  # the scan finds the others
    assert {each.state for each in store.versions.values()} == {VersionState.ANNOUNCED}
    assert (store.origin.lost, store.origin.rebuilt) == (True, False)
    assert "a record of VersionRecord is damaged" in (store.origin.cause or "")
    assert "journal.db.aside-1" in (store.origin.cause or "")
    assert store.last_event > entries  # nobody has read a later entry


async def test_the_journal_of_another_schema_is_moved_aside_and_rebuilt(root: Path, state: Path) -> None:
    path = await used(state, root)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION - 1}")
    store = opened(state, root)
    assert_decisions_stand(store)
    assert f"has schema {SCHEMA_VERSION - 1}, and this refitd writes {SCHEMA_VERSION}" in (store.origin.cause or "")
    with closing(sqlite3.connect(path.with_name("journal.db.aside-1"))) as connection:
        assert connection.execute("SELECT count(*) FROM versions").fetchone() == (30,)


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("UPDATE versions SET run = 'rum' WHERE id = ?", [OTHER]),
        ("UPDATE versions SET step = 13 WHERE id = ?", [OTHER]),
        ("UPDATE versions SET state = 'SEALEE' WHERE id = ?", [OTHER]),
        ("UPDATE updates SET run = 'rum'", []),
        ("UPDATE fingerprints SET record = replace(record, 'finger', 'fimger')", []),
        ("UPDATE fingerprints SET configuration = 'comfiguration'", []),
    ],
)
async def test_a_column_that_says_other_than_its_record_is_found_at_the_start(
    root: Path, state: Path, statement: str, values: list[str]
) -> None:
    rewrite(await used(state, root), statement, *values)
    store = opened(state, root)
    assert "was corrupt" in (store.origin.cause or "")
    assert_decisions_stand(store)


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeroed_page(number: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[number * 4096 : (number + 1) * 4096] = bytes(4096)
        path.write_bytes(data[: path.stat().st_size])

    return spoil


def flipped(seed: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        chance, data = random.Random(seed), bytearray(path.read_bytes())
        for _ in range(8):
            data[chance.choice([at for at, byte in enumerate(data) if byte and at >= 100])] ^= 1 << chance.randrange(8)
        path.write_bytes(data)

    return spoil


def without_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(100))


DAMAGES = {
    "cut to 100": cut_to(100),
    "cut to 4096": cut_to(4096),
    "halved": halved,
    "empty": cut_to(0),
    "deleted": Path.unlink,
    "without header": without_header,
    **{f"page {number} zeroed": zeroed_page(number) for number in range(24)},
    **{f"eight bits flipped, {seed}": flipped(seed) for seed in range(12)},
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_bars_pins_and_pauses_stand_whatever_becomes_of_the_journal(root: Path, state: Path, damage: str) -> None:
    path = await used(state, root)
    DAMAGES[damage](path)
    damaged = path.read_bytes() if path.exists() else None
    store = opened(state, root)
    assert_decisions_stand(store)
    if store.origin.cause is not None and damaged:
        assert path.with_name("journal.db.aside-1").read_bytes() == damaged
    assert_decisions_stand(opened(state, root))


@pytest.mark.parametrize("table", ["versions_newest", "sqlite_autoindex_versions_1", "versions_by_run"])
async def test_a_damaged_index_hides_no_version(root: Path, state: Path, table: str) -> None:
    """A version that is read back by an index that has lost it would come again by the scan, and not be barred."""
    path = await used(state, root)
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        number = connection.execute(query, (table,)).fetchone()[0]
    data = bytearray(path.read_bytes())
    cells = int.from_bytes(data[(number - 1) * 4096 + 3 : (number - 1) * 4096 + 5])
    data[(number - 1) * 4096 + 4] = cells // 2  # the page says that it has half as many entries
    path.write_bytes(data)
    store = opened(state, root)
    assert_decisions_stand(store)
    assert set(store.versions) in ({BARRED, PINNED}, {version(1, run="old").id, *(version(n).id for n in range(1, 30))})


async def test_an_entry_of_the_log_that_is_damaged_is_shown_as_such_among_the_others(root: Path, state: Path) -> None:
    rewrite(await used(state, root), "UPDATE events SET record = replace(record, 'sealed', 'seated') WHERE seq = 5")
    journal = Journal(state)
    entries = journal.read(lambda connection: rows.read_events(connection, after=3, limit=3))
    newest_first, _ = journal.read(lambda connection: rows.read_log(connection, before=7, limit=3))
    journal.close()
    assert [each.seq for each in entries] == [4, 5, 6] == [each.seq for each in reversed(newest_first)]
    assert "cannot be read" in entries[1].text
    assert entries[2].text == "sealed"


async def test_a_journal_that_has_lost_its_end_is_damaged(root: Path, state: Path) -> None:
    """Such as one that was brought back from a backup, or whose last writes SQLite has dropped."""
    journal = open_journal(state, root)
    journal.close()
    early = (state / JOURNAL_NAME).read_bytes()
    path = await used(state, root)
    path.write_bytes(early)
    store = opened(state, root)
    assert "it ends at entry 0" in (store.origin.cause or "")
    assert_decisions_stand(store)


async def test_a_start_is_refused_where_nobody_knows_what_was_barred(root: Path, state: Path) -> None:
    path = await used(state, root)
    decisions_path(root).write_bytes(b"x" + decisions_path(root).read_bytes()[1:])
    assert_decisions_stand(opened(state, root))  # the journal is sound
    halved(path)
    with pytest.raises(
        StartRefusedError, match=r"what was barred or pinned is not known; move decisions away"
    ) as error:
        opened(state, root)
    assert len(str(error.value).replace(str(root.parent), "")) <= 240
    decisions_path(root).unlink()
    opened(state, root)


@pytest.mark.parametrize("killed_in", ["move_aside", "Journal", "write_now", "write_note"])
async def test_a_kill_while_a_journal_is_rebuilt_loses_no_decision(
    root: Path, state: Path, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await used(state, root)
    damaged = path.read_bytes()[:5000]
    path.write_bytes(damaged)

    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Journal if killed_in == "write_now" else recovery, killed_in, killed)
        with pytest.raises(KilledError):
            opened(state, root)
    store = opened(state, root)
    assert_decisions_stand(store)
    assert (store.origin.lost, store.origin.rebuilt) == (True, False)
    assert state.joinpath("journal.db.aside-1").read_bytes() == damaged


async def test_a_host_whose_journal_is_lost_obeys_no_earlier_epoch_of_its_hub(root: Path, state: Path) -> None:
    path = await used(state, root, HostLead(leader="hub", heard={"hub": 7}))
    path.unlink()
    assert opened(state, root).origin.lead.fence == 7


async def test_what_operators_decide_is_in_the_root_before_they_are_answered(root: Path, state: Path) -> None:
    await used(state, root)
    decisions = read_decisions(root)
    assert decisions is not None
    assert {each.id for each in decisions.versions} == {BARRED, PINNED}
    assert [each.run for each in decisions.updates] == ["run"]
    assert [each.run for each in decisions.runs if each.closed_at] == ["old"]


async def test_where_the_root_cannot_be_written_the_answer_comes_and_the_log_says_so(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(state, root)
    store = Store(journal, SystemClock())
    decisions = DecisionFile(store, root, in_line)
    store.observe(decisions)
    said, again = list[str](), asyncio.Event()

    def say(_: str, __: str, text: str, **___: object) -> None:
        said.append(text)
        if len(said) == 2:
            again.set()

    monkeypatch.setattr(store, "say", say)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("refitd.state.decisions.JOURNAL_RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("refitd.state.decisions.replace_file", full)
        writing = [asyncio.create_task(task()) for task in (journal.run, decisions.run)]
        store.put_version(version(1, pinned=True))
        await decisions.written()
        assert "are in the journal alone" in said[0]
        assert "No space left" in said[0]
    await again.wait()
    assert "again" in said[1]
    assert read_decisions(root) is not None
    for task in writing:
        task.cancel()
    await asyncio.wait(writing)
    journal.close()
