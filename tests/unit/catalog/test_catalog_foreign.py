"""Trainers' own folders in the catalog: what they write last, what they write again, what they delete."""

import shutil
from pathlib import Path

from refitd_client.contract.naming import INDEX_NAME
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import Trainer
from support.catalogs import watching
from support.checkpoints import tensors, write_model, write_shards

SEALED, SETTLING, LOST, REJECTED = (
    VersionState.SEALED,
    VersionState.SETTLING,
    VersionState.LOST,
    VersionState.REJECTED,
)


async def test_a_marker_that_comes_before_the_files_is_not_believed(tmp_path: Path) -> None:
    async with watching(tmp_path, trainers=[Trainer.PRIME_RL]) as stage:
        folder = write_shards(stage.root / "run/.parts", tensors(1))
        late = folder / "model-00002-of-00002.safetensors"
        late.rename(stage.root / "run/.late")
        (folder / "STABLE").touch()
        folder.rename(stage.root / "run/step_1")
        waiting = await stage.verdict("run~v000001", SETTLING)
        assert late.name in (waiting.reason or "")
        (stage.root / "run/.late").rename(stage.root / "run/step_1" / late.name)
        await stage.verdict("run~v000001", SEALED)


async def test_a_trainer_that_was_restarted_writes_its_folders_again_and_begins_a_new_generation(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path, trainers=[Trainer.SLIME]) as stage:
        for step in (1, 2, 3):
            write_shards(stage.root / f"run/weight_v{step:06d}", tensors(step))
            await stage.verdict(f"run~v{step:06d}", SEALED)
        for step in (1, 2):
            write_shards(stage.root / f"run/weight_v{step:06d}", tensors(10 + step))
            again = await stage.verdict(f"run~v{step:06d}.g2", SEALED)
            assert again.path == f"run/weight_v{step:06d}"
        assert stage.store.versions["run~v000001"].state is LOST
        goals = stage.targets.of_run("run")
        assert goals.target is not None
        assert goals.target.id == "run~v000002.g2"


async def test_a_rejected_folder_that_is_written_again_is_looked_at_again(tmp_path: Path) -> None:
    async with watching(tmp_path, trainers=[Trainer.SLIME]) as stage:
        whole = tensors(1)
        write_shards(stage.root / "run/weight_v000001", {**whole, "layer.9.weight": whole["layer.0.weight"]})
        rejected = await stage.verdict("run~v000001", REJECTED)
        assert "layer.9.weight" in (rejected.reason or "")
        write_shards(stage.root / "run/weight_v000001", whole)
        await stage.verdict("run~v000001", SEALED)


async def test_what_its_trainer_deletes_is_lost_and_what_comes_back_unchanged_is_the_same(tmp_path: Path) -> None:
    async with watching(tmp_path, trainers=[Trainer.TRANSFORMERS]) as stage:
        folder = write_model(stage.root / "run/checkpoint-1", tensors(1))
        await stage.verdict("run~v000001", SEALED)
        folder.rename(tmp_path / "away")
        await stage.verdict("run~v000001", LOST)
        (tmp_path / "away").rename(folder)
        await stage.verdict("run~v000001", SEALED)
        assert list(stage.store.versions) == ["run~v000001"]
        shutil.rmtree(folder)
        await stage.verdict("run~v000001", LOST)


async def test_a_delta_of_slime_s_reaches_nobody(tmp_path: Path) -> None:
    async with watching(tmp_path, trainers=[Trainer.SLIME]) as stage:
        folder = write_shards(stage.root / "run/.parts", tensors(1))
        index = (folder / INDEX_NAME).read_text().replace('"metadata": {}', '"metadata": {"delta_encoding": "xor"}')
        (folder / INDEX_NAME).write_text(index)
        folder.rename(stage.root / "run/weight_v000001")
        rejected = await stage.verdict("run~v000001", REJECTED)
        assert "delta_encoding" in (rejected.reason or "")
