"""`refitd fsck` on a real root and a real journal: what it finds, what it repairs, what it leaves alone."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd.clock import SystemClock
from refitd.root.ownership import owned
from refitd.state.journal.recovery import open_journal
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.naming import slot_name, slots_path
from refitd_client.contract.states import VersionState
from refitd_client.validation.examine import structure
from support.checkpoints import publish, tensors
from support.command_line import refitd
from support.records import engine, version


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A root and a journal that agree about steps 1 to 3."""
    root = tmp_path / "root"
    for step in (1, 2, 3):
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
    for step in (1, 2, 3):
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


def fsck(job: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Run it; its exit code, and what it found."""
    places = ["--root", str(job / "root"), "--state", str(job / "state"), "--no-engines"]
    result = refitd("fsck", *places, *flags, "--json")
    return result.exit_code, msgspec.json.decode(result.stdout)["findings"]


def found(job: Path, *flags: str) -> tuple[int, list[str]]:
    code, findings = fsck(job, *flags)
    return code, [finding["kind"] for finding in findings]


def tree(job: Path) -> dict[str, bytes]:
    """Every file under the root and the state folder, but for what a look may touch: locks, clocks, SQLite's index."""
    passing = {"lock", "clock", "journal.db-shm", "journal.db-wal"}
    return {str(p): p.read_bytes() for p in sorted(job.rglob("*")) if p.is_file() and p.name not in passing}


def v(job: Path, step: int) -> Path:
    return job / "root" / "run" / f"v{step:06d}"


def test_all_agrees(job: Path) -> None:
    assert found(job, "--deep") == (0, [])
    text = refitd("fsck", "--root", str(job / "root"), "--state", str(job / "state"), "--no-engines").stdout
    assert (
        text.strip()
        == "journal, disk and engines agree. No engine was asked: --engine URL or --engines-file asks them too."
    )


def test_a_check_changes_nothing(job: Path) -> None:
    (job / "state" / "journal.db").write_bytes(b"garbage, and quite a lot of it")
    shutil.rmtree(v(job, 1))
    before = tree(job)
    assert fsck(job, "--deep")[0] == 1
    assert tree(job) == before


def test_files_that_are_gone_or_were_rewritten_are_marked_as_lost(job: Path) -> None:
    shutil.rmtree(v(job, 1))
    (v(job, 2) / "refit.json").write_bytes(b"{}")
    assert found(job) == (1, ["version-changed", "version-gone"])
    assert found(job, "--repair") == (0, ["version-changed", "version-gone"])
    assert [read(job).versions[version(step).id].state for step in (1, 2, 3)] == ["LOST", "LOST", "SEALED"]
    assert found(job) == (0, [])


def test_a_flipped_byte_is_found_by_reading_every_byte(job: Path) -> None:
    shard = next(v(job, 2).glob("*.safetensors"))
    status, data = shard.stat(), bytearray(shard.read_bytes())
    data[-1] ^= 1
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert found(job) == (0, [])
    assert found(job, "--deep") == (1, ["version-damaged"])
    fsck(job, "--deep", "--repair")
    assert read(job).versions[version(2).id].state is VersionState.LOST


def test_a_version_that_the_journal_does_not_know_is_no_disagreement(job: Path) -> None:
    publish(job / "root", "run", 4, tensors(4))
    assert found(job) == (0, ["version-unknown"])


def test_gc_that_was_killed_in_mid_delete_is_finished(job: Path) -> None:
    def retire(_: Path, store: Store) -> None:
        store.put_version(version(1, state=VersionState.RETIRED))

    write(job, retire)
    trash = job / "root" / ".refitd" / "trash" / ("0" * 32) / ("1" * 32)
    trash.mkdir(parents=True)
    (trash / "model.safetensors").write_bytes(b"x")
    assert found(job) == (1, ["trash-left", "version-half-reclaimed"])
    code, findings = fsck(job, "--repair")
    assert (code, [finding["repaired"] for finding in findings]) == (0, [True, True])
    assert not trash.parent.exists()
    assert [v(job, step).exists() for step in (1, 2, 3)] == [False, True, True]
    assert version(1).id in read(job).gone


@pytest.mark.parametrize(
    "needed",
    [
        engine(serving=version(1).id),
        engine(unproven=(version(1).id,), known=False),
        engine(model_path="/mnt/run/v000001"),
    ],
)
def test_what_an_engine_may_still_read_is_not_taken_away_by_a_repair(job: Path, needed: EngineRecord) -> None:
    def retire(_: Path, store: Store) -> None:
        store.put_version(version(1, state=VersionState.RETIRED))
        store.put_engine(needed)

    write(job, retire)
    code, findings = fsck(job, "--repair")
    half = next(finding for finding in findings if finding["kind"] == "version-half-reclaimed")
    assert code == 1
    assert half["outcome"].startswith("it stays: engine a")
    assert v(job, 1).exists()


def test_an_abandoned_folder_of_a_dead_publisher_is_taken_away_and_a_living_ones_is_not(job: Path) -> None:
    dead, alive = job / "root" / "run" / ".incoming-dead", job / "root" / "run" / ".incoming-alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / ".lock").touch()
    with (alive / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found(job) == (1, ["incoming-abandoned"])
        assert found(job, "--repair")[0] == 0
    assert (dead.exists(), alive.exists()) == (False, True)


def test_a_slot_that_was_being_made_is_taken_away_and_a_free_one_is_not(job: Path) -> None:
    slots = job / "root" / slots_path("run")
    for name in (slot_name("a" * 32, "b" * 32), ".making-x"):
        (slots / name).mkdir(parents=True)
        (slots / name / "model.safetensors").write_text("garbage")
    assert found(job) == (1, ["slot-damaged"])
    assert fsck(job, "--repair")[0] == 0
    assert [path.name for path in slots.iterdir()] == [slot_name("a" * 32, "b" * 32)]
    assert found(job) == (0, [])
    assert list((job / "root" / ".refitd" / "trash").iterdir()) == []


def test_an_attempt_without_an_outcome_taints_its_engine(job: Path) -> None:
    def begin(_: Path, store: Store) -> None:
        store.open_attempt("a", version(2).id)

    write(job, begin)
    assert found(job) == (1, ["attempt-open"])
    assert found(job, "--repair") == (0, ["attempt-open"])
    assert found(job) == (0, [])
    assert not read(job).engines["a"].known


def test_links_and_files_of_others_are_named_and_never_touched(job: Path) -> None:
    root = job / "root"
    (root / "notes.txt").write_text("mine")
    (root / "run" / "latest").symlink_to("v000003")
    os.mkfifo(root / "run" / "pipe")
    code, findings = fsck(job, "--repair")
    assert code == 0
    assert {finding["subject"] for finding in findings} == {"notes.txt", "run/latest", "run/pipe"}
    assert (root / "notes.txt").exists()
    assert (root / "run" / "latest").is_symlink()


def test_a_corrupt_journal(job: Path) -> None:
    path = job / "state" / "journal.db"
    path.write_bytes(b"no database, by no means" * 1000)
    garbage = path.read_bytes()
    code, findings = fsck(job)
    assert (code, findings[0]["kind"]) == (1, "journal-corrupt")
    assert "bars, pins and pauses stand" in findings[0]["advice"]
    assert path.read_bytes() == garbage
    assert fsck(job, "--repair")[0] == 0
    assert path.with_name("journal.db.corrupt-1").read_bytes() == garbage
    origin = read(job).origin
    assert (origin.lost, origin.rebuilt) == (True, False)
    code, kinds = found(job)
    assert (code, kinds) == (0, ["journal-rebuilding", *["version-unknown"] * 3])
    assert all(v(job, step).exists() for step in (1, 2, 3))


def test_a_deleted_journal(job: Path) -> None:
    (job / "state" / "journal.db").unlink()
    assert found(job) == (1, ["journal-missing"])
    assert found(job, "--repair") == (0, ["journal-missing"])
    assert read(job).origin.lost


def test_a_journal_that_lies_elsewhere_is_named(job: Path) -> None:
    flags = ["--root", str(job / "root"), "--state", str(job / "other"), "--no-engines", "--json"]
    result = refitd("fsck", *flags)
    (finding,) = msgspec.json.decode(result.stdout)["findings"]
    assert (result.exit_code, finding["kind"]) == (1, "journal-elsewhere")
    assert finding["advice"] == f"say --state {job / 'state'}"
    assert not (job / "other").exists()


def test_a_running_service_is_looked_at_and_never_repaired(job: Path) -> None:
    shutil.rmtree(v(job, 1))
    with owned(job / "root"):
        assert found(job) == (1, ["version-gone", "service-running"])
        result = refitd("fsck", "--root", str(job / "root"), "--state", str(job / "state"), "--repair")
        assert result.exit_code == 1
        assert "another refitd" in result.stderr
    assert read(job).versions[version(1).id].state is VersionState.SEALED


def test_no_service_starts_while_a_root_is_checked(job: Path) -> None:
    from refitd.diagnose.journal import still
    from refitd.root.ownership import StartRefusedError

    with still(job / "root") as running:
        assert running is None
        with pytest.raises(StartRefusedError), owned(job / "root"):
            pass


def test_a_root_that_is_none_is_an_error_and_not_a_finding(tmp_path: Path) -> None:
    result = refitd("fsck", "--root", str(tmp_path / "none"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is no folder" in result.stderr


def test_settings_are_those_of_the_service(job: Path) -> None:
    environment = {"REFITD_ROOT": str(job / "root"), "REFITD_STATE": str(job / "state")}
    assert refitd("fsck", "--no-engines", env=environment).exit_code == 0
    assert refitd("fsck", env={}).exit_code == 2


def test_a_report_for_people_says_what_to_do(job: Path) -> None:
    shutil.rmtree(v(job, 1))
    text = refitd("fsck", "--root", str(job / "root"), "--state", str(job / "state"), "--no-engines").stdout
    assert "publish the step again, or roll back" in text
    assert "1 disagreement: --repair can mend 1." in text
