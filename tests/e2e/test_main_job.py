"""The main job on real processes: a trainer publishes, refitd rolls it out to embedded engines and collects the old."""

import subprocess
import sys
from pathlib import Path

import pytest

from refitd_client.contract.states import EngineState
from support.jobs import RUN, TOKEN, running, served_by
from support.servers import EmbeddedServer, RefitdServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TRAINER = """
import sys
from refitd_client import PublishOptions, WeightPublisher

root, run, url, token, *models = sys.argv[1:]
with WeightPublisher(root, run, url, options=PublishOptions(token=token)) as publisher:
    for step, model in enumerate(models, start=1):
        served = publisher.publish(model, step=step).wait(timeout=60)
        print(step, served.outcome.value, flush=True)
"""


def train(job_root: Path, refitd: RefitdServer, *models: Path) -> list[str]:
    """A trainer in a process of its own, which publishes `models` as steps 1, 2, … and waits for each."""
    command = [sys.executable, "-c", TRAINER, str(job_root), RUN, refitd.url, TOKEN, *map(str, models)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_what_a_trainer_publishes_is_what_engines_answer_with_and_the_last_k_stay(models: Path, tmp_path: Path) -> None:
    a, b = models / "model_a", models / "model_b"
    with EmbeddedServer(tmp_path, a) as engine, running(tmp_path, engine, "--keep-last", "2") as job:
        old = served_by(engine)
        assert train(job.root, job.refitd, b, a, b, a, b) == [f"{step} served" for step in range(1, 6)]
        new = served_by(engine)
        assert (new.path, new.label) == (str(job.root / RUN / "v000005"), "5")
        assert new.answer != old.answer
        job.client.reclaim()
        assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000004", "v000005"]
        assert served_by(engine) == new
    with EmbeddedServer(tmp_path, b) as other:
        assert served_by(other).answer == new.answer


def test_an_engine_that_was_killed_is_brought_to_the_target_when_it_is_back(models: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        job.serve(models / "model_b", 1)
        before = served_by(engine)
        engine.kill()
        gone = job.until_engine(EngineState.UNREACHABLE)
        engine.restart()
        job.until_engine(EngineState.IN_SYNC, after=gone.seq)
        assert served_by(engine) == before
