"""Each example does what its first lines say: engines serve what it trains. Heavy libraries: tests/trainers."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from refitd_embedded.__main__ import main
from support.forked import ended
from support.jobs import RUN, TOKEN, Job, running, served_by
from support.scripts import script_ended
from support.servers import API_KEY, EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As examples/README.md makes it."""
    folder = tmp_path / "tiny"
    assert ended(main, ["refitd_embedded", "--make-model", str(folder)], dict(os.environ))[0] == 0
    return folder


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, model) as engine, running(tmp_path, engine, "--trainers", "prime-rl,openrlhf") as job:
        yield job


def run(job: Job, example: str, *words: str | Path, ranks: int = 1) -> str:
    """Run an example to its end; what it prints. Several ranks have interpreters of their own."""
    own = {"REFITD_ROOT": str(job.root), "REFITD_RUN": RUN, "REFITD_URL": job.refitd.url, "REFITD_TOKEN": TOKEN}
    own |= {"ENGINE_KEY": API_KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    script = EXAMPLES / example
    if ranks > 1:
        several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*several, str(script), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)
        status, said = done.returncode, done.stdout + done.stderr
    elif script.parent.name in ("transformers", "trl"):
        status, said = script_ended(script, *words, **own)
    else:
        status, said = ended(partial(be, script), [str(script), *map(str, words)], os.environ | own)
    assert status == 0, said[-6000:]
    return said


def be(script: Path) -> None:
    """Be an example, as its interpreter would run it."""
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def follow(job: Job, *steps: int) -> None:
    """These steps were published, and the last of them is served."""
    version = f"{RUN.replace('/', '~')}~v{steps[-1]:06d}"
    job.until(lambda event: event.subject == version and event.text.startswith("served"))
    assert sorted(version.step for version in job.client.versions().items) == list(steps)
    assert served_by(job.engine).label == str(steps[-1])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_trl_s_rollouts_come_from_the_engine_that_its_steps_are_brought_to(
    ranks: int, job: Job, model: Path, tmp_path: Path
) -> None:
    said = run(job, "trl/grpo_sglang.py", job.root, RUN, job.refitd.url, model, tmp_path / "out", ranks=ranks)
    # Ranks write to one pipe, and a line's end is a write of its own.
    assert len(re.findall(r"trained 3, rollouts came from steps 0 1 2(?! \d)", said)) == ranks
    follow(job, 0, 1, 2, 3)


@pytest.mark.thorough  # test_trainer_callback.py
def test_engines_follow_a_training_of_transformers(job: Job, model: Path, tmp_path: Path) -> None:
    run(job, "transformers/train.py", job.root, RUN, job.refitd.url, model, tmp_path / "out")
    follow(job, 1, 2, 3)


@pytest.mark.parametrize("encoding", ["xor", pytest.param("overwrite", marks=pytest.mark.thorough)])
def test_engines_follow_slime_s_deltas(encoding: str, job: Job, model: Path, tmp_path: Path) -> None:
    run(job, "slime/updates.py", encoding, model, tmp_path / "slime")
    follow(job, 1, 2, 3)
    assert [version.kind for version in job.client.versions().items].count("delta") == 2


@pytest.mark.thorough  # test_trainer_folders.py
def test_engines_follow_prime_rl_s_folders(job: Job, model: Path) -> None:
    run(job, "prime-rl/broadcast.py", job.root, RUN, model)
    follow(job, 1, 2)


@pytest.mark.thorough  # test_trainer_folders.py
def test_engines_follow_what_openrlhf_saves(job: Job, model: Path) -> None:
    run(job, "openrlhf/save.py", job.root, RUN, model)
    follow(job, 1, 2)
