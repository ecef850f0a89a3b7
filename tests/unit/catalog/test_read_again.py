"""What looks otherwise than when it was sealed is read again, and its bytes decide."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.catalog import checks
from refitd.catalog.files import DiskFiles
from refitd.policy.keep import KeepRules, keep
from refitd.policy.next_action import Agenda, Goals, Probe, RefitTo, next_action
from refitd.root.scan import FoundFolder, Listing
from refitd.state.observer import Observer
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.examine import ReadAgain, structure
from refitd_client.validation.foreign import MANIFESTS, Trainer, described, has_kept_manifest
from support.catalogs import Stage, watching
from support.checkpoints import publish, tensors, write_model, write_shards
from support.records import engine, version

LOST, SEALED = VersionState.LOST, VersionState.SEALED
V1, SHARD = "run~v000001", "model-00001-of-00002.safetensors"


def put_back(folder: Path) -> None:
    """The same bytes and times under other inodes, as `cp -a` and `rsync -a` restore them."""
    copy = folder.with_name(f".{folder.name}")
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)


def link(folder: Path) -> None:
    os.link(folder / SHARD, folder.parent / "linked")


CHANGES: dict[str, Callable[[Path], object]] = {
    "put back": put_back,
    "touched": lambda folder: os.utime(folder / SHARD, ns=(1, 1)),
    "chmod": lambda folder: (folder / SHARD).chmod(0o600),
    "linked": link,
    "written anew": lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()),
}


async def read_as_now(stage: Stage, id_: str, path: str) -> VersionRecord:
    """Wait until a version is known as its files look now."""
    (now,) = (await DiskFiles(stage.root).signatures([path])).values()
    await stage.until(
        lambda: stage.store.versions[id_].files.signature == now and not stage.store.versions[id_].verdict.in_doubt
    )
    return stage.store.versions[id_]


@pytest.mark.parametrize("write", [lambda root: publish(root, "run", 1, tensors(1)), None])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_the_same_bytes_are_the_same_version_however_their_files_look(
    tmp_path: Path, change: Callable[[Path], object], write: Callable[[Path], Path] | None
) -> None:
    seen: list[VersionState] = []
    async with watching(tmp_path) as stage:
        folder = write(stage.root) if write else write_shards(stage.root / "run/v000001", tensors(1))
        sealed = await stage.verdict(V1, SEALED)
        stage.store.observe(_Noting(seen))
        change(folder)
        kept = await read_as_now(stage, V1, sealed.path)
        assert (kept.state, kept.reason, kept.digest) == (SEALED, None, sealed.digest)
        assert await stage.catalog.check(kept)
        # The service's manifest of a folder that has none counts for the files as they look now.
        manifest = described(stage.root, structure(stage.root, sealed.path)).manifest
        assert manifest is not None
        assert manifest.files.keys() <= {file.name for file in folder.iterdir()}
    assert LOST not in seen


async def test_a_version_whose_kept_manifest_is_gone_when_its_files_are_put_back_gets_another(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = write_shards(stage.root / "run/v000001", tensors(1))
        sealed = await stage.verdict(V1, SEALED)
        shutil.rmtree(stage.root / SERVICE_FOLDER / MANIFESTS)
        put_back(folder)
        assert (await read_as_now(stage, V1, sealed.path)).state is SEALED
        assert has_kept_manifest(stage.root, sealed.path)


async def test_a_version_whose_manifest_cannot_be_kept_is_served_and_says_which_way_it_takes(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        (stage.root / SERVICE_FOLDER / MANIFESTS).write_bytes(b"")  # as a disk that is full, or another user's folder
        write_shards(stage.root / "run/v000001", tensors(1))
        sealed = await stage.verdict(V1, SEALED)
    assert not sealed.files.described
    assert "the service cannot keep a manifest of it (" in sealed.verdict.notes[-1]
    assert "File exists" in sealed.verdict.notes[-1]


class _Noting(Observer):
    def __init__(self, seen: list[VersionState]) -> None:
        self._seen = seen

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        self._seen.append(after.state)


async def test_several_versions_that_were_gone_are_sealed_again_when_a_copy_of_them_is_put_back(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        for step in (1, 2, 3):
            publish(stage.root, "run", step, tensors(step))
            await stage.verdict(f"run~v{step:06d}", SEALED)
        shutil.copytree(stage.root / "run", tmp_path / "backup")
        shutil.rmtree(stage.root / "run")
        for step in (1, 2, 3):
            await stage.verdict(f"run~v{step:06d}", LOST)
        shutil.copytree(tmp_path / "backup", stage.root / "run")
        for step in (1, 2, 3):
            assert (await stage.verdict(f"run~v{step:06d}", SEALED)).reason is None


async def test_a_root_that_was_restored_while_the_service_was_down_is_as_good_as_before(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        for step in (1, 2):
            publish(stage.root, "run", step, tensors(step))
            await stage.verdict(f"run~v{step:06d}", SEALED)
        shutil.rmtree(stage.root / "run/v000001")
        await stage.verdict(V1, LOST)
    publish(tmp_path / "root", "run", 1, tensors(1))
    put_back(tmp_path / "root/run/v000002")
    async with watching(tmp_path) as stage:
        assert (await read_as_now(stage, V1, "run/v000001")).state is SEALED
        assert (await read_as_now(stage, "run~v000002", "run/v000002")).state is SEALED


async def test_only_other_contents_are_a_loss_and_the_right_ones_end_it(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        await stage.verdict(V1, SEALED)
        good = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        lost = await stage.verdict(V1, LOST)
        assert "read again, and has other contents" in (lost.reason or "")
        (folder / SHARD).write_bytes(good[:-9])  # it is being copied back
        (folder / SHARD).write_bytes(good)
        await stage.verdict(V1, SEALED)


async def test_files_that_were_damaged_in_place_and_lost_for_it_do_not_pass_for_being_back(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        await stage.verdict(V1, SEALED)
        _store_without_a_trace(folder / SHARD)
        os.utime(folder / "refit.json", ns=(1, 1))
        await stage.verdict(V1, LOST)
        publish(stage.root, "run", 2, tensors(2))
        await stage.verdict("run~v000002", SEALED)  # looks went by
        lost = stage.store.versions[V1]
        assert (lost.state, lost.files.signature) == (LOST, None)


def _store_without_a_trace(file: Path) -> None:
    """Change a byte, as through a mapping on a tmpfs: no time and no size changes."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


async def test_a_version_that_keeps_changing_is_not_read_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    original = DiskFiles.read_again

    async def counted(self: DiskFiles, path: str) -> ReadAgain:
        reads.append(path)
        return await original(self, path)

    monkeypatch.setattr(DiskFiles, "read_again", counted)
    monkeypatch.setattr(checks, "RETRY_SECONDS", 3600.0)
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        sealed = await stage.verdict(V1, SEALED)
        os.utime(folder / SHARD, ns=(1, 1))
        await read_as_now(stage, V1, sealed.path)
        os.utime(folder / SHARD, ns=(2, 2))
        await stage.until(lambda: stage.store.versions[V1].verdict.in_doubt)
        publish(stage.root, "run", 2, tensors(2))
        await stage.verdict("run~v000002", SEALED)
        assert stage.store.versions[V1].verdict.in_doubt
        assert reads == ["run/v000001"]


def test_nothing_is_loaded_from_a_version_while_it_is_read_again() -> None:
    doubted = version(1, in_doubt=True)
    goals = Goals(target=doubted, wanted=doubted, loadable=doubted)
    assert isinstance(next_action(engine(state=EngineState.BEHIND), goals, Agenda(), 1.0), Probe)
    tainted = engine(state=EngineState.TAINTED, known=False)
    assert isinstance(next_action(tainted, goals, Agenda(), 1.0), Probe)
    good = version(1)
    goals = Goals(target=good, wanted=good, loadable=good)
    assert isinstance(next_action(engine(state=EngineState.BEHIND), goals, Agenda(), 1.0), RefitTo)


def test_what_is_read_again_stays_also_where_its_files_were_lost_and_the_budget_wants_the_room() -> None:
    restored = version(1, state=LOST, in_doubt=True, bytes=100)
    newest = version(2, bytes=100)
    listing = Listing(
        tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in (restored, newest)), frozenset()
    )
    kept, _ = keep([restored, newest], {}, KeepRules(disk_budget=1), listing=listing, ages={})
    assert kept.keep
    assert "LOST, and its files are read again" in kept.reasons


async def test_a_version_without_a_manifest_that_is_written_on_after_it_was_sealed_is_judged_again_and_loaded_again(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path) as stage:
        folder = write_shards(stage.root / "run/v000001", tensors(1))
        first = await stage.verdict(V1, SEALED)
        stage.store.put_engine(engine(known=True, serving=V1, configuration="c"))
        stage.store.record_fingerprint(V1, "c", "of half of it")
        write_shards(folder, tensors(2))
        await stage.until(lambda: stage.store.versions[V1].digest != first.digest)
        assert stage.store.versions[V1].state is SEALED
        assert stage.store.engines["a"].debts.reload
        assert stage.store.fingerprint(V1, "c") is None


async def test_a_folder_that_a_later_step_is_written_into_is_not_the_earlier_version_any_more(tmp_path: Path) -> None:
    """Else a rollback to the earlier step would load the later one, and call it by the earlier's name."""
    async with watching(tmp_path) as stage:
        folder = write_shards(stage.root / "run/latest", tensors(1))
        await stage.intake.take(Notice(run="run", step=1, path="run/latest"))
        await stage.verdict(V1, SEALED)
        write_shards(folder, tensors(2))
        await stage.intake.take(Notice(run="run", step=2, path="run/latest"))
        await stage.verdict("run~v000002", SEALED)
        await stage.until(lambda: stage.store.versions[V1].state is LOST)
        assert "run~v000002 was written over it" in (stage.store.versions[V1].reason or "")


async def test_a_version_without_a_manifest_is_read_once_more_after_its_first_load(tmp_path: Path) -> None:
    """A store through a mapping on a tmpfs changes neither times nor sizes."""
    async with watching(tmp_path) as stage:
        folder = write_shards(stage.root / "run/v000001", tensors(1))
        first = await stage.verdict(V1, SEALED)
        _store_without_a_trace(folder / SHARD)
        stage.store.put_version(_served(stage.store.versions[V1]))
        await stage.until(lambda: stage.store.versions[V1].digest != first.digest)
        await stage.until(lambda: stage.store.versions[V1].verdict.confirmed)
        assert stage.store.versions[V1].state is SEALED


def _served(record: VersionRecord) -> VersionRecord:
    return record.having(served_at="2026-01-01T00:00:00Z")


async def test_a_version_with_a_manifest_is_not_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its publisher has said which bytes are right, and they were found."""
    reads: list[str] = []

    async def counted(_: DiskFiles, path: str) -> ReadAgain:
        reads.append(path)
        return ReadAgain("", None)

    monkeypatch.setattr(DiskFiles, "read_again", counted)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        stage.store.put_version(_served(await stage.verdict(V1, SEALED)))
        assert await stage.catalog.check(stage.store.versions[V1])
        publish(stage.root, "run", 2, tensors(2))
        await stage.verdict("run~v000002", SEALED)
    assert reads == []


async def test_a_trainer_s_folder_that_was_touched_begins_no_generation(tmp_path: Path) -> None:
    async with watching(tmp_path, trainers=[Trainer.TRANSFORMERS]) as stage:
        folder = write_model(stage.root / "run/checkpoint-1", tensors(1))
        sealed = await stage.verdict(V1, SEALED)
        put_back(folder)
        assert (await read_as_now(stage, V1, sealed.path)).state is SEALED
        assert list(stage.store.versions) == [V1]


async def test_what_cannot_be_read_again_is_no_loss_and_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, tries = DiskFiles.read_again, asyncio.Event()

    async def failing(self: DiskFiles, path: str) -> ReadAgain:
        if not tries.is_set():
            tries.set()
            raise OSError(5, "Input/output error")
        return await original(self, path)

    monkeypatch.setattr(DiskFiles, "read_again", failing)
    monkeypatch.setattr(checks, "LONGEST_RETRY_SECONDS", 0.01)
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        sealed = await stage.verdict(V1, SEALED)
        os.utime(folder / SHARD, ns=(1, 1))
        await tries.wait()
        assert stage.store.versions[V1].state is SEALED
        await read_as_now(stage, V1, sealed.path)
