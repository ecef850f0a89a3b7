"""The released torchtune and torchtitan: engines serve what their own checkpointers are given."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import RUN, TOKEN, Job, running, served_by
from support.servers import KIT, TRAINERS_VENV, EmbeddedServer
from support.trainers import EXAMPLES, TREE, run_there

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]

VENV = Path(TRAINERS_VENV or "").absolute()


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Triton is a stand-in, which no kernel is launched with: the real one takes 1 GB."""
    shutil.copytree(KIT / "shims/triton", tmp_path / "shims/triton")
    paths = (TREE / "client", TREE / "service", EXAMPLES / "torchtune", tmp_path / "shims")
    path = os.pathsep.join(map(str, paths))
    return {"PYTHONPATH": path, "REFITD_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def follow(job: Job, *steps: int) -> None:
    """These steps were published, and the last of them is served."""
    assert sorted(version.step for version in job.client.versions().items) == list(steps)
    assert (served_by(job.engine).label, job.engine_now.step) == (str(steps[-1]), steps[-1])


def test_engines_follow_the_epochs_of_a_recipe_of_torchtune_s(variables: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, "-m", "refitd_embedded", "--make-model", str(model)], check=True)
    with EmbeddedServer(tmp_path, model) as engine, running(tmp_path, engine, "--base-model", str(model)) as job:
        before = served_by(engine).answer
        settings = {"root": job.root, "run": RUN, "service_url": job.refitd.url, "checkpoint_dir": model}
        place = [f"checkpointer.{name}={value}" for name, value in settings.items()]
        (recipe,) = VENV.glob("lib/*/site-packages/recipes/full_finetune_single_device.py")  # what `tune run` runs
        configuration = ["--config", EXAMPLES / "torchtune/tiny.yaml", *place, f"output_dir={tmp_path / 'out'}"]
        run_there(recipe, *configuration, **variables)
        follow(job, 1, 2)
        assert served_by(engine).answer != before


def test_engines_follow_the_steps_for_which_torchtitan_calls_its_checkpointer(
    variables: dict[str, str], tmp_path: Path
) -> None:
    example, model, out = EXAMPLES / "torchtitan/train.py", tmp_path / "model", tmp_path / "out"
    run_there(example, "--make-model", model, **variables)
    with EmbeddedServer(tmp_path, model) as engine, running(tmp_path, engine, "--base-model", str(model)) as job:
        ranks = ["--standalone", "--nproc-per-node", 2]
        said = run_there(VENV / "bin/torchrun", *ranks, example, job.root, RUN, job.refitd.url, out, **variables)
        assert "trained 2" in said
        follow(job, 1, 2)
