"""Trainers that know nothing of refitd write folders of their own, and real engines follow them."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from refitd_client.contract.naming import INDEX_NAME
from support.jobs import RUN, Job, running, served_by
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TRAINERS = "slime,prime-rl,grail,transformers,areal,openrlhf"
PATHS = ("weight_v000001", "step_2", "checkpoint-3/FULL", "checkpoint-4", "weight_update_v5", "global_step6_hf")


def write_as_trainers_do(model: Path, folder: Path) -> None:
    """Shards one after another, then the small files, then the index."""
    weights = load_file(model / "model.safetensors")
    names, index = sorted(weights), dict[str, str]()
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        shard = f"model-{number:05d}-of-00002.safetensors"
        part = names[number - 1 :: 2]
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    shutil.copy(model / "config.json", folder)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def served(job: Job, step: int, generation: int = 1) -> str:
    """Wait until a step is served; the path of its folder beneath the run's."""
    suffix = "" if generation == 1 else f".g{generation}"
    id_ = f"{RUN.replace('/', '~')}~v{step:06d}{suffix}"
    job.until(lambda event: event.subject == id_ and event.text.startswith("served"))
    return job.client.version(id_).path.removeprefix(f"{RUN}/")


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with (
        EmbeddedServer(tmp_path, models / "model_a") as engine,
        running(tmp_path, engine, "--trainers", TRAINERS, "--keep-last", "1") as job,
    ):
        yield job


def test_each_trainer_s_folders_are_served_when_they_are_complete_and_never_deleted(models: Path, job: Job) -> None:
    run, answers = job.root / RUN, list[list[int]]()
    for step, name in enumerate(PATHS, start=1):
        write_as_trainers_do(models / ("model_b" if step % 2 else "model_a"), run / name)
        if name.startswith("step_"):
            (run / name / "STABLE").touch()
        if name.endswith("FULL"):
            (run / name).parent.joinpath("READY-4").touch()
        assert served(job, step) == name
        now = served_by(job.engine)
        assert (now.path, now.label) == (str(run / name), str(step))
        answers.append(now.answer)
    assert answers[0] == answers[2] == answers[4] != answers[1] == answers[3] == answers[5]
    plan = job.client.reclaim()
    assert all((run / name).is_dir() for name in PATHS)
    assert all(any("--reclaim-foreign" in why for why in item.reasons) for item in plan.items if item.version)


def test_a_slime_that_is_restarted_writes_its_steps_again_and_engines_follow(models: Path, job: Job) -> None:
    for step in (1, 2):
        write_as_trainers_do(models / "model_b", job.root / RUN / f"weight_v{step:06d}")
        served(job, step)
    old = served_by(job.engine)
    write_as_trainers_do(models / "model_a", job.root / RUN / "weight_v000001")
    assert served(job, 1, generation=2) == "weight_v000001"
    assert served_by(job.engine).answer != old.answer
