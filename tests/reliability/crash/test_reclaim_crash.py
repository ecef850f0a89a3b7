"""GC killed in mid-delete: kill -9 at every journal and file-system step of a sweep, and the next one finishes it.

What stays is whole, what goes is gone, and journal and disk agree.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import mortal_sweep
import pytest

from refitd.clock import SystemClock
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.recovery import Sound, examine_journal, open_journal, reading
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState, VersionState
from support import points
from support.rawfiles import raw
from support.records import engine, version

KEEP_LAST = 2
GOING = {VersionState.RETIRED, VersionState.DELETED}
STEPS = range(1, 8)
KEPT = {"run/v000003", "run/v000004", "run/v000006", "run/v000007", "run/.incoming-alive"}
GONE = {"run/v000001", "run/v000005", "run/.incoming-dead"}
MIXED = "run/v000002"  # files of others lie in its folder
KINDS = {"commit", "committed", "mkdir", "rename", "remove", "rmdir", "fsync"}
REST = {"inner/deep", "link", "notes.txt"}


def what_is_known() -> list[VersionRecord]:
    """Seven good versions: an engine serves 3, 4 is pinned, 6 and 7 are the newest."""
    records = {step: version(step, bytes=100, owned=True) for step in STEPS}
    records[4] = records[4].having(pinned=True)
    records[7] = records[7].having(served_at="2026-01-01T00:00:00Z")
    return list(records.values())


async def prepare(place: Path) -> None:
    """A root and the journal that belongs to it. One version's folder also holds what is none of its files."""
    root = place / "root"
    (place / "precious").mkdir(parents=True)
    (place / "precious" / "thesis").write_text("years of work")
    (root / SERVICE_FOLDER).mkdir(parents=True)
    for record in what_is_known():
        write(root / record.path, "model.safetensors", "refit.json")
    write(root / MIXED / "inner", "deep")
    (root / MIXED / "notes.txt").write_text("months of work")
    (root / MIXED / "link").symlink_to(place / "precious")
    for name in ("dead", "alive"):
        write(root / "run" / f".incoming-{name}", "model.safetensors")
    for path in (*(root / "run" / ".incoming-dead").rglob("*"), root / "run" / ".incoming-dead"):
        os.utime(path, (0, 0))
    journal = open_journal(place / "state", root)
    store = Store(journal, SystemClock())
    for record in what_is_known():
        store.put_version(record)
    store.put_engine(engine(serving=version(3).id, state=EngineState.IN_SYNC))
    store.rebuilt()
    writing = asyncio.create_task(journal.run())
    await store.durable()
    writing.cancel()
    await asyncio.wait({writing})
    journal.close()


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        header = raw(f'{{"__metadata__": {{"of": "{folder.name}"}}}}'.encode())
        (folder / name).write_bytes(header if name.endswith(".safetensors") else f"{folder.name} {name}".encode())


def found(folder: Path) -> dict[str, str | bytes]:
    """All files below a folder, by their paths; links as links."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def in_place(root: Path) -> dict[str, dict[str, str | bytes]]:
    """What lies in the run's folder."""
    return {f"run/{path.name}": found(path) for path in (root / "run").iterdir()}


def states(place: Path) -> dict[str, VersionState]:
    """What the journal says, by path."""
    condition = examine_journal(place / "state" / JOURNAL_NAME, thorough=True)
    assert isinstance(condition, Sound), condition
    with reading(place / "state" / JOURNAL_NAME) as connection:
        return {record.path: record.state for record in rows.read_versions(connection)}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    asyncio.run(prepare(tmp_path / "prepared"))
    return tmp_path / "prepared"


def check_killed(place: Path, before: dict[str, dict[str, str | bytes]]) -> None:
    """What a kill leaves: nothing is half in its place, and nothing has left it that was not written down first."""
    here, known = in_place(place / "root"), states(place)
    mixed = here.pop(MIXED)
    assert mixed.items() <= before[MIXED].items()
    assert mixed.keys() >= REST, f"what is not refitd's left {MIXED}"
    assert mixed == before[MIXED] or known[MIXED] in GOING
    assert mixed.keys() == REST or known[MIXED] is not VersionState.DELETED
    for path, files in here.items():
        assert files == before[path], f"half of {path} is in its place"
    for path, state in known.items():
        assert path in {*here, MIXED} or state in GOING, f"{path} is gone, and {state}"
        assert path not in here or state is not VersionState.DELETED, f"{path} is there, and called DELETED"
    assert here.keys() >= KEPT


def check_swept(place: Path, before: dict[str, dict[str, str | bytes]]) -> None:
    """What the next sweep leaves."""
    here, known = in_place(place / "root"), states(place)
    rest = {name: before[MIXED][name] for name in REST}
    assert here == {path: before[path] for path in KEPT} | {MIXED: rest}
    deleted = {path for path, state in known.items() if state is VersionState.DELETED}
    assert deleted == {version for version in {*GONE, MIXED} if "/v" in version}
    assert {path for path, state in known.items() if state is VersionState.SEALED} == {v for v in KEPT if "/v" in v}
    assert list((place / "root" / SERVICE_FOLDER / "trash").iterdir()) == []


@pytest.mark.points
@pytest.mark.timeout(600)
def test_kill_9_at_every_journal_and_file_system_step_of_a_sweep(prepared: Path, tmp_path: Path) -> None:
    """GC killed in mid-delete."""
    places = tmp_path / "places"
    places.mkdir()
    before = in_place(prepared / "root")
    command = [sys.executable, "-W", "ignore", mortal_sweep.__file__, prepared, places, str(KEEP_LAST)]
    command += [str(points.FIRST), str(points.STRIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *killed, through = sorted(places.iterdir())
    check_swept(through, before)
    died = [(place / "effects").read_text().splitlines()[int(place.name) - 1] for place in killed]
    for place, effect in zip(killed, died, strict=True):
        try:
            check_killed(place, before)
            asyncio.run(mortal_sweep.sweep(place, KEEP_LAST))
            check_swept(place, before)
        except AssertionError as error:
            error.add_note(f"killed at effect {place.name} ({effect})")
            raise
    assert found(prepared / "precious") == {"thesis": b"years of work"}, "a link was followed"
    print(f"died at {len(died)} effects: {', '.join(died)}")
    kinds = {effect.split()[0] for effect in died}
    assert kinds <= KINDS
    assert kinds == KINDS or not points.EVERY
    assert len(died) > 60 // points.STRIDE
