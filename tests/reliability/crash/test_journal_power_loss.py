"""Power loss with unsynced writes: what the journal called durable is there, and what is there is a prefix."""

import asyncio
import ctypes
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from recorded_sqlite import Effect, Opened, Said, Synced, Truncated, Written, recording, sqlite_library
from sqlite_states import Moment, moments

from refitd.clock import SystemClock
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import Sound, examine_journal, open_journal
from refitd.state.store import Store
from refitd_client.contract.wire import Event
from support.points import EVERY, taken
from support.records import version

STEPS = 40  # versions that are written again and again
SESSIONS = (1240, 200)  # facts; SQLite moves its log into the database in the first, and when each is closed
BATCH = 40
SAMPLES = 3
SEED = 20261121


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = sqlite_library()
    if found is None:
        pytest.skip("this Python has SQLite built in without its names: the system's Python has not")
    return found


def fact(number: int) -> tuple[rows.JournalWrite, rows.JournalWrite]:
    """Two writes that belong together: a version as it is at `number`, and the event that says so."""
    record = version(number % STEPS, reason=f"{number} " + "." * 2500)
    event = Event(seq=number, at="t", kind="version", subject=record.id, text=f"{number}")
    return rows.put(record), rows.put(event)


async def keep(folder: Path, effects: list[Effect]) -> None:
    """Keep a journal as the service does, and note in between what was called durable."""
    number = 0
    for length in SESSIONS:
        journal = await asyncio.to_thread(Journal, folder)
        task = asyncio.create_task(journal.run())
        for count in range(number, number + length, BATCH):
            for number in range(count + 1, count + BATCH + 1):
                journal.append(*fact(number))
            await journal.durable()
            effects.append(Said(number))
        task.cancel()
        await asyncio.wait({task})
        journal.close()


def choose(effects: list[Effect], chance: random.Random) -> set[int]:
    """The moments to look at: those around every change of the database itself, and some of the others."""
    first_said = next(number for number, effect in enumerate(effects) if isinstance(effect, Said))
    chosen = set(chance.sample(range(first_said), 40)) | {len(effects)}
    for number, effect in enumerate(effects):
        match effect:
            case Synced(name) if name == JOURNAL_NAME:
                chosen |= {number - 9, number - 3, number, number + 1, number + 2, number + 3}
            case Synced() | Said() if number > first_said:
                chosen |= {number} if chance.random() < 0.4 else set()
            case Truncated() | Opened():
                chosen.add(number)
            case _:
                pass
    return {number for number in chosen if 0 <= number <= len(effects)}


def check(moment: Moment, files: dict[str, bytes], folder: Path) -> int:
    """Start on what is left, and return how many facts are there."""
    state, root = folder / "state", folder / "root"
    for made in (state, root / ".refitd"):
        made.mkdir(parents=True)
    for name, content in files.items():
        (state / name).write_bytes(content)
    if moment.said:  # before that, it is one that never held anything, which may be begun again
        condition = examine_journal(state / JOURNAL_NAME, thorough=True)
        assert isinstance(condition, Sound), condition
    with closing(open_journal(state, root)) as journal:
        store = Store(journal, SystemClock())
        count = store.last_event
        assert count >= moment.said, "what was called durable is gone"
        events = journal.read(lambda connection: rows.read_events(connection, after=0, limit=10_000))
        assert [event.seq for event in events] == list(range(1, count + 1))
        last = {number % STEPS: number for number in range(1, count + 1)}
        found = {record.order.step: int((record.reason or "").split()[0]) for record in store.versions.values()}
        assert found == last, "what is there is no prefix of what was written"
    return count


@pytest.mark.points
def test_power_loss_with_unsynced_writes_leaves_of_the_journal_a_prefix_with_all_that_was_durable(
    library: ctypes.CDLL, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    with recording(library) as recorder:
        asyncio.run(keep(tmp_path / "recorded", recorder.effects))
    effects = recorder.effects
    first = effects.index(Said(BATCH))
    moved = [effect for effect in effects[first:] if isinstance(effect, Written) and effect.file == JOURNAL_NAME]
    assert len(moved) > 3 * STEPS, "SQLite moved its log into the database, in each session and in between"
    tried, ahead = 0, 0
    for moment in moments(effects, {*taken(sorted(choose(effects, chance)))}, chance, SAMPLES):
        for number, files in enumerate(moment.states):
            folder = tmp_path / "after"
            try:
                ahead += check(moment, files, folder) > moment.said
            except Exception as error:
                error.add_note(f"seed {SEED}, power cut before effect {moment.number}, state {number}")
                raise
            shutil.rmtree(folder)
            tried += 1
    print(f"seed {SEED}: {tried} states after a power cut, {len(effects)} effects")
    assert tried > (200 if EVERY else 60)
    assert ahead > 0, "some states held more than was promised: the cuts were not all clean ones"
