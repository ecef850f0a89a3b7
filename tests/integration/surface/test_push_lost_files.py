"""A hub with an engine loses the files of what it serves; followers of its object store go where its engine goes."""

import shutil
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles
from refitd.reclaim.books import Books
from refitd_client.bucket.pointer import Pointer
from refitd_client.contract.states import VersionState
from support.buckets import ScriptedBucket
from support.checkpoints import publish, tensors
from support.pushing import has_pushed
from support.services import Stage, serving


def id_of(step: int) -> str:
    return f"run~v{step:06d}"


async def pushed(stage: Stage, bucket: ScriptedBucket) -> Pointer:
    return await has_pushed(stage.store, stage.targets, stage.root, bucket, run="run", keep=3)


async def lost(stage: Stage, step: int) -> None:
    """Somebody deletes the folder of a version."""
    shutil.rmtree(stage.root / "run" / f"v{step:06d}")
    await stage.until(id_of(step), lambda record: record.state is VersionState.LOST)


async def rolled_back(stage: Stage, to: int | None = None) -> None:
    order = {"run": "run"} | ({} if to is None else {"to": id_of(to)})
    answer = await stage.http.post("/v1/rollback", json=order)
    assert answer.status_code == 200, answer.text


async def test_followers_stay_with_the_hub_s_engine_on_lost_files_and_go_back_with_it_at_a_rollback(
    tmp_path: Path,
) -> None:
    bucket = ScriptedBucket()
    async with serving(tmp_path) as stage:
        for step in (1, 2, 3):
            await stage.served(step)
            assert (await pushed(stage, bucket)).target == id_of(step)
        await lost(stage, 3)
        pointer = await pushed(stage, bucket)
        assert stage.store.engines["a:1"].serving == id_of(3)
        assert (pointer.target, [version.barred for version in pointer.versions]) == (id_of(3), [False] * 3)
        await rolled_back(stage)
    async with serving(tmp_path) as stage:  # which was killed before the store was told
        pointer = await pushed(stage, bucket)
        assert pointer.target == id_of(2)
        assert [version.id for version in pointer.versions if version.barred] == [id_of(3)]


@pytest.mark.parametrize("is_newest", [True, False])
async def test_a_rollback_bars_what_was_lost_and_is_deleted_also_behind_a_newer_version(
    tmp_path: Path, is_newest: bool
) -> None:
    """A store has it, and its followers would go there."""
    bucket = ScriptedBucket()
    async with serving(tmp_path, names=()) as stage:  # what an engine serves is not deleted
        for step in (1, 2, 3):
            publish(stage.root, "run", step, tensors(step))
            await stage.until(id_of(step), lambda record: record.state is VersionState.SEALED)
            await pushed(stage, bucket)
        await lost(stage, 3)
        writer = Books(stage.store, stage.targets, DiskFiles(stage.root))
        writer.retire(stage.store.versions[id_of(3)], "evidence for long enough")
        writer.deleted(stage.store.versions[id_of(3)])
        if not is_newest:
            (stage.root / "run" / "v000004").mkdir()
            (stage.root / "run" / "v000004" / "refit.json").write_bytes(b"{}")
            await stage.rejected(id_of(4))
        assert (await pushed(stage, bucket)).target == id_of(3)
        await rolled_back(stage, to=1)
        pointer = await pushed(stage, bucket)
        assert pointer.target == id_of(1)
        assert [version.id for version in pointer.versions if version.barred] == [id_of(3), id_of(2)]
