"""The released AReaL's own engine client, name-resolve and WeightUpdateMeta, through the front: not an imitation."""

from collections.abc import Generator
from pathlib import Path

import pytest

from support.areal import released_areal
from support.front import FrontServer
from support.jobs import RUN, Job, running, served_by
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.areal, pytest.mark.timeout(600)]


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def test_the_released_areal_updates_its_engine_through_the_front(models: Path, tmp_path: Path, job: Job) -> None:
    with FrontServer(tmp_path, job, "--engine", f"{job.engine.url}=0") as front:
        start, first, second = released_areal("sglang", front.url, tmp_path, models / "model_b", models / "model_a")
    assert (first["version"], second["version"]) == (1, 2)
    assert first["deleted"]
    assert second["deleted"]  # AReaL has deleted its files, and refitd holds the versions
    assert start["tokens"] == second["tokens"] != first["tokens"]
    assert (first["versions"], second["versions"]) == ([1] * 8, [2] * 8)
    assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000001", "v000002"]
    assert (served_by(job.engine).path, served_by(job.engine).label) == (str(job.root / RUN / "v000002"), "2")


def test_the_released_areal_broadcasts_to_its_engine_through_the_front(models: Path, tmp_path: Path, job: Job) -> None:
    """`weight_update_mode: xccl`, over Gloo: its own group, and its client's calls."""
    with FrontServer(tmp_path, job, "--engine", f"{job.engine.url}=0") as front:
        start, first, second = released_areal(
            "sglang-xccl", front.url, tmp_path, models / "model_b", models / "model_a"
        )
    assert start["tokens"] == second["tokens"] != first["tokens"]
    assert (first["versions"], second["versions"]) == ([1] * 8, [2] * 8)
    assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000001", "v000002"]
    assert (served_by(job.engine).path, served_by(job.engine).label) == (str(job.root / RUN / "v000002"), "2")
