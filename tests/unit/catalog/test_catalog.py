"""The catalog at work: real files, a real journal, a base model to hold checkpoints against."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd.catalog.files import DiskFiles
from refitd.problem import ProblemError
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.validate import Evidence, Structure
from support.catalogs import watching
from support.checkpoints import publish, tensors, write_model, write_shards


async def test_a_version_with_a_manifest_is_found_and_sealed(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        found = await stage.verdict("run~v000001", VersionState.SEALED)
        assert found.files.owned
        assert (found.digest or "").startswith("xxh3:")


async def test_a_checkpoint_without_manifest_is_sealed_when_it_has_settled(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        write_shards(stage.root / "run/v000001", tensors(1))
        found = await stage.verdict("run~v000001", VersionState.SEALED)
        assert not found.files.owned


async def test_a_shard_that_is_late_is_waited_for(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        staged = write_shards(tmp_path / "staged", tensors(1))
        folder = stage.root / "run/v000001"
        shutil.copytree(staged, folder, ignore=shutil.ignore_patterns("model-00002*"))
        found = await stage.verdict("run~v000001", VersionState.SETTLING)
        assert "model-00002-of-00002.safetensors" in (found.reason or "")
        shutil.copy(staged / "model-00002-of-00002.safetensors", folder)
        await stage.verdict("run~v000001", VersionState.SEALED)


async def test_half_a_checkpoint_is_rejected_by_the_name_of_what_is_missing(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = write_shards(stage.root / "run/v000001", tensors(1))
        (folder / "model-00002-of-00002.safetensors").unlink()
        found = await stage.verdict("run~v000001", VersionState.REJECTED)
        assert "model-00002-of-00002.safetensors" in (found.reason or "")
        assert folder.exists()


async def test_a_non_finite_value_is_rejected_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        weights = tensors(1)
        weights["layer.2.weight"][1, 1] = np.nan
        publish(stage.root, "run", 1, weights)
        found = await stage.verdict("run~v000001", VersionState.REJECTED)
        assert "layer.2.weight" in (found.reason or "")


async def test_a_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        weights = tensors(1)
        weights["layer.0.weight"] = np.zeros((5, 3), dtype=np.float32)
        publish(stage.root, "run", 1, weights)
        found = await stage.verdict("run~v000001", VersionState.REJECTED)
        assert "layer.0.weight" in (found.reason or "")


async def test_a_flipped_byte_is_rejected(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        staged = publish(tmp_path / "staged", "run", 1, tensors(1))
        shard = staged / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(bytes(data))
        (stage.root / "run").mkdir()
        staged.rename(stage.root / "run/v000001")
        found = await stage.verdict("run~v000001", VersionState.REJECTED)
        assert shard.name in (found.reason or "")


async def test_the_same_path_rewritten_after_it_was_sealed_is_lost(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        sealed = await stage.verdict("run~v000001", VersionState.SEALED)
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"other")
        assert not await stage.catalog.check(sealed)
        await stage.verdict("run~v000001", VersionState.LOST)


async def test_a_version_that_is_taken_away_is_lost(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        await stage.verdict("run~v000001", VersionState.SEALED)
        shutil.rmtree(folder)
        await stage.verdict("run~v000001", VersionState.LOST)


async def test_a_vanished_root_changes_no_version(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.verdict("run~v000001", VersionState.SEALED)
        stage.root.rename(tmp_path / "unmounted")
        seen = -1
        async with asyncio.timeout(10):
            while stage.store.faults.root is None:
                seen = await stage.store.changed.wait_after(seen, within=0.05)
        assert stage.store.versions["run~v000001"].state is VersionState.SEALED


async def test_without_an_engine_or_a_base_model_a_version_waits_and_says_for_what(tmp_path: Path) -> None:
    async with watching(tmp_path, base=False) as stage:
        publish(stage.root, "run", 1, tensors(1))
        found = await stage.verdict("run~v000001", VersionState.UNKNOWN)
        assert "--base-model" in (found.reason or "")


async def test_a_notice_announces_a_directory_with_a_name_of_its_own(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        write_model(stage.root / "trainer/checkpoint-5", tensors(5))
        record, new = await stage.intake.take(Notice(run="run", step=5, path="trainer/checkpoint-5"))
        assert new
        await stage.verdict(record.id, VersionState.SEALED)
        again, new = await stage.intake.take(Notice(run="run", step=5, path="trainer/checkpoint-5"))
        assert not new
        assert again.id == record.id


async def test_one_step_with_two_contents_is_a_conflict(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        for name in ("one", "two"):
            write_model(stage.root / f"trainer/{name}", tensors(len(name)))
        await stage.intake.take(Notice(run="run", step=5, path="trainer/one"))
        with pytest.raises(ProblemError, match="step 5"):
            await stage.intake.take(Notice(run="run", step=5, path="trainer/two"))


@pytest.mark.parametrize(
    ("path", "slug"), [("/etc", "path-outside-root"), ("../x", "path-outside-root"), ("run/nothing", "path-missing")]
)
async def test_a_notice_for_a_bad_path_is_refused(tmp_path: Path, path: str, slug: str) -> None:
    async with watching(tmp_path) as stage:
        with pytest.raises(ProblemError) as caught:
            await stage.intake.take(Notice(run="run", step=1, path=path))
        assert caught.value.kind.slug == slug
        assert stage.store.versions == {}


async def test_a_link_in_place_of_a_version_is_refused(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        write_model(tmp_path / "elsewhere")
        (stage.root / "run").mkdir()
        (stage.root / "run/link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ProblemError) as caught:
            await stage.intake.take(Notice(run="run", step=1, path="run/link"))
        assert caught.value.kind.slug == "path-unreadable"


async def test_one_notice_a_thousand_times_at_once_is_one_new_version(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        write_model(stage.root / "trainer/checkpoint-5", tensors(5))
        notice = Notice(run="run", step=5, path="trainer/checkpoint-5")
        async with asyncio.TaskGroup() as group:
            takes = [group.create_task(stage.intake.take(notice)) for _ in range(1000)]
        assert sum(new for _, new in (take.result() for take in takes)) == 1


async def test_a_notice_that_comes_after_the_watch_may_still_allow_missing_tensors(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        weights = tensors(1)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 1, weights)
        await stage.verdict("run~v000001", VersionState.REJECTED)
        await stage.intake.take(Notice(run="run", step=1, allow_missing=["layer.1.*"]))
        await stage.verdict("run~v000001", VersionState.SEALED)


async def test_a_notice_that_comes_while_its_version_is_read_has_it_judged_anew_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version that its trainer publishes is such a one: the watch sees it before the notice is there."""
    examine, reading, told = DiskFiles.examine, asyncio.Event(), asyncio.Event()
    reads: list[str] = []

    async def slow(files: DiskFiles, seen: Structure, *args: Any, **more: Any) -> Evidence:
        reads.append(seen.path)
        evidence = await examine(files, seen, *args, **more)
        reading.set()
        await told.wait()
        return evidence

    monkeypatch.setattr(DiskFiles, "examine", slow)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await reading.wait()
        await stage.intake.take(Notice(run="run", step=1, allow_missing=["layer.1.*"]))
        told.set()
        await stage.verdict("run~v000001", VersionState.SEALED)
    assert reads == ["run/v000001"]


async def test_a_folder_of_an_old_generation_that_nobody_ordered_is_refused_by_name_and_not_deleted(
    tmp_path: Path,
) -> None:
    """A trainer without the SDK writes step 50 in a run that was restarted: its folder has no suffix."""
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 41, tensors(1), generation=4)
        await stage.verdict("run~v000041.g4", VersionState.SEALED)
        write_shards(stage.root / "run/v000050", tensors(2))
        late = await stage.verdict("run~v000050", VersionState.REJECTED)
        assert late.verdict.code is Code.OLD_GENERATION
        assert "call it v000050.g4" in (late.reason or "")
        publish(stage.root, "run", 40, tensors(3))
        assert (await stage.verdict("run~v000040", VersionState.SEALED)).files.owned
