"""The released AReaL's own engine client, name-resolve and WeightUpdateMeta, against a facade: not an imitation."""

import getpass
import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.areal import ArealServer
from support.jobs import RUN, Job, running, served_by
from support.servers import AREAL_VENV, EmbeddedServer

pytestmark = [pytest.mark.areal, pytest.mark.timeout(600)]

TRAIN = Path(__file__).resolve().parents[1] / "areal/train.py"


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def train(how: str, url: str, tmp_path: Path, *models: Path) -> list[dict[str, Any]]:
    """Run AReaL's part in its own environment, as the page says; what it saw at the start and after each update."""
    python = Path(AREAL_VENV or "").absolute() / "bin/python"
    places = [str(tmp_path / "name_resolve"), str(tmp_path / "fileroot")]
    command = [str(python), "-W", "ignore", str(TRAIN), how, *places, *map(str, models)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["AREAL_LLM_SERVER_ADDRS"] = url.removeprefix("http://")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept, cwd=tmp_path)
    found = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0])


def test_the_released_areal_updates_its_engine_through_the_facade(models: Path, tmp_path: Path, job: Job) -> None:
    with ArealServer(tmp_path, job, "--engine", f"{job.engine.url}=0") as facade:
        start, first, second = train("engine", facade.url, tmp_path, models / "model_b", models / "model_a")
    assert (first["version"], second["version"]) == (1, 2)
    assert first["deleted"]
    assert second["deleted"]  # AReaL has deleted its files, and refitd holds the versions
    assert start["tokens"] == second["tokens"] != first["tokens"]
    assert (first["versions"], second["versions"]) == ([1] * 8, [2] * 8)
    assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000001", "v000002"]
    assert (served_by(job.engine).path, served_by(job.engine).label) == (str(job.root / RUN / "v000002"), "2")


def test_what_the_released_areal_records_is_served(models: Path, tmp_path: Path, job: Job) -> None:
    """Its own update of engines is switched off; generation goes through a facade beside the watch."""
    trial = tmp_path / "name_resolve" / getpass.getuser() / "exp/trial"
    weights = tmp_path / "fileroot/checkpoints" / getpass.getuser() / "exp/trial/default"
    flags = ["--engine", f"{job.engine.url}=0", "--watch", str(trial), "--weights", str(weights)]
    with ArealServer(tmp_path, job, *flags) as facade:
        train("record", facade.url, tmp_path, models / "model_b")
        job.until(lambda event: event.subject.endswith("v000001") and event.text.startswith("served"))
    assert (served_by(job.engine).path, served_by(job.engine).label) == (str(job.root / RUN / "v000001"), "1")
