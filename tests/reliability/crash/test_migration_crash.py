"""An end in the middle of a migration, by kill -9 or a power cut: the journal is the old one or the new one."""

import ctypes
import os
import random
import shutil
import signal
import sqlite3
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from recorded_sqlite import Said, recording, sqlite_library
from sqlite_states import moments

from refitd.state.journal.condition import Sound, examine_journal
from refitd.state.journal.copies import copy_of
from refitd.state.journal.recovery import open_journal
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from support.journals import OLD, dump, old_journal, schema_of
from support.points import EVERY, taken

SEED = 20261121
SAMPLES = 3
CUTS = 40 if EVERY else 14
STRIDE = 3  # most effects are one record after the other
_CONNECT = sqlite3.connect
_NAMES = frozenset({"os.rename", "os.remove", "os.link"})


def prepared(place: Path, name: str) -> tuple[Path, Path]:
    """A state folder with an old journal, and its root."""
    root = place / "root"
    (root / ".refitd").mkdir(parents=True)
    old_journal(name, place / "state")
    return place / "state", root


def outcome(state: Path, root: Path) -> list[str]:
    """What a start that nothing disturbs makes of it."""
    open_journal(state, root).close()
    return dump(state / JOURNAL_NAME)


def start_and_die(state: Path, root: Path, at: int) -> bool:
    """Start in a process of its own that is killed at effect number `at`; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            die_at(at)
            open_journal(state, root).close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def die_at(number: int) -> None:
    """Count the statements of every connection and the changes of names, and die before one of them."""
    left = number

    def effect(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(*args: Any, **named: Any) -> sqlite3.Connection:
        connection = _CONNECT(*args, **named)
        connection.set_trace_callback(effect)
        return connection

    sqlite3.connect = sqlite3.dbapi2.connect = connect
    sys.addaudithook(lambda event, _: effect() if event in _NAMES else None)


@pytest.mark.points
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", [*taken(OLD)])
def test_kill_all_along_a_migration_leaves_the_old_journal_or_the_new_one(name: str, tmp_path: Path) -> None:
    state, root = prepared(tmp_path / "calm", name)
    old = dump(state / JOURNAL_NAME)
    new = outcome(state, root)
    found = {"old": 0, "new": 0}
    for number in count(1, STRIDE):
        place = tmp_path / "killed"
        state, root = prepared(place, name)
        died = start_and_die(state, root, number)
        left = dump(state / JOURNAL_NAME)
        assert left in (old, new), f"killed at effect {number}"
        found["old" if left == old else "new"] += 1
        if left != old:
            copy = copy_of(state / JOURNAL_NAME, schema_of(name))
            assert dump(copy) == old, "the copy is complete before anything changes"
        assert outcome(state, root) == new
        shutil.rmtree(place)
        if not died:
            break
    assert number > 30
    assert min(found.values()) > 3, found


@pytest.mark.points
def test_power_loss_in_a_migration_leaves_the_old_journal_or_the_new_one(tmp_path: Path) -> None:
    library: ctypes.CDLL | None = sqlite_library()
    if library is None:
        pytest.skip("this Python has SQLite built in without its names: the system's Python has not")
    chance = random.Random(SEED)
    with recording(library) as recorder:
        state, root = prepared(tmp_path / "calm", "schema-1-first")
        old = dump(state / JOURNAL_NAME)
        begins = len(recorder.effects)
        recorder.effects.append(Said(1))
        new = outcome(state, root)
    effects = recorder.effects
    cuts = set(chance.sample(range(begins, len(effects)), min(CUTS, len(effects) - begins))) | {len(effects)}
    seen = {"old": 0, "new": 0}
    for moment in moments(effects, cuts, chance, SAMPLES):
        for number, files in enumerate(moment.states):
            place = tmp_path / "after"
            state, root = place / "state", place / "root"
            state.mkdir(parents=True)
            (root / ".refitd").mkdir(parents=True)
            for file, content in files.items():
                (state / file).write_bytes(content)
            what = f"seed {SEED}, power cut before effect {moment.number}, state {number}"
            condition = examine_journal(state / JOURNAL_NAME, thorough=True)
            assert isinstance(condition, Sound), what
            seen["new" if condition.schema == SCHEMA_VERSION else "old"] += 1
            assert dump(state / JOURNAL_NAME) == (new if condition.schema == SCHEMA_VERSION else old), what
            assert outcome(state, root) == new, what
            shutil.rmtree(place)
    print(f"seed {SEED}: {seen} after a power cut, {len(effects) - begins} effects")
    assert min(seen.values()) > CUTS // 4
