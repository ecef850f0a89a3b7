"""A run that is deleted stays deleted, wherever the service is killed on the way: at every journal and file step."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mortal_sweep
import pytest

from refitd.clock import SystemClock
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.recovery import open_journal, reading
from refitd.state.records import RunRecord
from refitd.state.store import Store
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import MANIFESTS
from support import points
from support.rawfiles import raw
from support.records import version

GONE = "exp/old"


async def prepare(place: Path, *runs: str) -> None:
    """A root where each run has three versions: two good ones, the second with files of others, and one without proof
    that it is a version. The service keeps a manifest.
    """
    root = place / "root"
    (root / SERVICE_FOLDER / MANIFESTS).mkdir(parents=True)
    (root / SERVICE_FOLDER / MANIFESTS / "of-a-version.json").write_text("{}")
    journal = open_journal(place / "state", root)
    store = Store(journal, SystemClock())
    for run in runs:
        for step in (1, 2, 3):
            record = version(step, run=run, bytes=100, owned=True)
            (root / record.path).mkdir(parents=True)
            (root / record.path / "model.safetensors").write_bytes(b"torn" if step == 3 else raw(b"{}"))
            store.put_version(replace(record, state=VersionState.REJECTED) if step == 3 else record)
        (root / run / "v000002" / "notes.txt").write_text("months of work")
    store.rebuilt()
    writing = asyncio.create_task(journal.run())
    await store.durable()
    writing.cancel()
    await asyncio.wait({writing})
    journal.close()


def files(root: Path, run: str) -> list[str]:
    return sorted(str(path.relative_to(root / run)) for path in (root / run).rglob("*") if path.is_file())


def known(place: Path) -> tuple[bool, dict[str, VersionState]]:
    """Whether the journal has the mark, and what it says of the versions."""
    with reading(place / "state" / JOURNAL_NAME) as connection:
        marked = any(run.run == GONE and run.deleted is not None for run in rows.read_records(connection, RunRecord))
        return marked, {record.id: record.state for record in rows.read_versions(connection)}


WHOLE = ["v000001/model.safetensors", "v000002/model.safetensors", "v000002/notes.txt", "v000003/model.safetensors"]
LEFT = ["v000002/notes.txt", "v000003/model.safetensors"]  # nothing proves that these are refitd's


@pytest.mark.points
@pytest.mark.timeout(600)
@pytest.mark.parametrize("others", [[], ["exp/next"]], ids=["alone", "beside another run"])
def test_kill_9_at_every_step_of_a_deletion_ends_in_deleted_or_in_nothing_done(
    tmp_path: Path, others: list[str]
) -> None:
    prepared, places = tmp_path / "prepared", tmp_path / "places"
    places.mkdir()
    asyncio.run(prepare(prepared, GONE, *others))
    command = [sys.executable, "-W", "ignore", mortal_sweep.__file__, prepared, places, "2"]
    command += [str(points.FIRST), str(points.STRIDE), GONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    marks = set[bool]()
    for place in sorted(places.iterdir()):
        marked, _ = known(place)
        marks.add(marked)
        if not marked:
            assert files(place / "root", GONE) == WHOLE, f"{place.name}: something went before the mark was durable"
            continue
        asyncio.run(mortal_sweep.sweep(place, 2))
        _, states = known(place)
        mine = {id_: state for id_, state in states.items() if id_.startswith("exp~old~")}
        assert set(mine.values()) == {VersionState.DELETED}, f"{place.name}: {mine}"
        assert files(place / "root", GONE) == LEFT, place.name
        assert list((place / "root" / SERVICE_FOLDER / "trash").iterdir()) == []
        assert list((place / "root" / SERVICE_FOLDER / MANIFESTS).iterdir()) == []
        for run in others:
            assert files(place / "root", run) == WHOLE
    assert True in marks
