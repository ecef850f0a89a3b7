"""A training ends, the next takes its engine, and the old one's run is deleted by the command; across a restart."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refitd_client import PublishOptions, WeightPublisher
from support.jobs import PATIENCE, RUN, TOKEN, Job, running
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def refitd(job: Job, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "refitd", *words, "--url", job.refitd.url]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"REFITD_TOKEN": TOKEN}, timeout=60)


def until_gone(folder: Path) -> None:
    """Nobody tells when the collector has been here."""
    ends = time.monotonic() + PATIENCE
    while list(folder.glob("v*")):
        assert time.monotonic() < ends, sorted(folder.iterdir())
        time.sleep(0.05)


def test_a_run_is_deleted_once_no_engine_follows_it_and_its_name_begins_anew(models: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        for step in (1, 2):
            job.serve(models / "model_a", step)
        refused = refitd(job, "runs", "delete", RUN, "--yes")
        assert refused.returncode != 0
        assert f"follows run {RUN}" in refused.stderr

        assert refitd(job, "runs", "close", RUN, "--yes").returncode == 0
        with WeightPublisher(
            job.root, "exp/next", job.refitd.url, options=PublishOptions(token=TOKEN, engines="mine")
        ) as publisher:
            publisher.publish(models / "model_b", step=1).wait(timeout=PATIENCE)
        unasked = refitd(job, "runs", "delete", RUN)
        assert "this deletes all versions of the run, for good" in unasked.stderr
        done = refitd(job, "runs", "delete", RUN, "--yes", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run"] == RUN
        job.refitd.kill()
        job.refitd.restart()
        until_gone(job.root / RUN)
        assert RUN not in refitd(job, "runs").stdout

        assert refitd(job, "runs", "close", "exp/next", "--yes").returncode == 0
        with WeightPublisher(
            job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN, engines="mine")
        ) as publisher:
            publication = publisher.publish(models / "model_a", step=3)
            assert publication.version_id.endswith("~v000003.g2"), "an earlier run's name was used again"
            publication.wait(timeout=PATIENCE)
