"""The floors in pyproject.toml are true: a service and its commands run with these very versions, and nothing else."""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from support.installed import InstalledServer, ran
from support.servers import EmbeddedServer

pytestmark = pytest.mark.e2e

TREE = Path(__file__).parents[2]
PYTHON = str(Path(os.environ.get("REFITD_LOWEST_VENV", "")).absolute() / "bin/python")
FROM_HERE = {"PYTHONPATH": f"{TREE / 'client'}:{TREE / 'service'}"}
RUN = "run"


@pytest.fixture
def service(tmp_path: Path, models: Path) -> Generator[InstalledServer]:
    (tmp_path / "engine").mkdir()
    with (
        EmbeddedServer(tmp_path / "engine", models / "model_a") as engine,
        InstalledServer(PYTHON, FROM_HERE, tmp_path / "service", tmp_path / "root", [engine.url]) as service,
    ):
        yield service


def test_the_lowest_versions_publish_update_roll_back_diagnose_and_collect(
    service: InstalledServer, tmp_path: Path, models: Path
) -> None:
    refitd = service.refitd
    root = ("--root", str(tmp_path / "root"))
    for step, model in enumerate(("model_b", "model_a", "model_b"), 1):
        refitd("publish", str(models / model), *root, "--run", RUN, "--step", str(step), "--wait")
    refitd("rollback", RUN, "--yes")
    service.restart()
    assert json.loads(refitd("wait", "--run", RUN, "--step", "2", "--json"))["outcome"] == "served"
    assert "fail" not in refitd("doctor", *root)
    assert RUN in refitd("status")
    refitd("reclaim", "--yes")


def test_the_lowest_versions_are_those_that_the_lock_names() -> None:
    """Else the other test says nothing about the floors."""
    there = dict(json.loads(ran(PYTHON, "-c", _VERSIONS)))
    for line in (TREE / "deploy/locks/lowest.txt").read_text().splitlines():
        name, is_pin, version = line.partition(" ")[0].partition("==")
        if is_pin and ";" not in line:
            assert there[name.replace("_", "-")] == version


_VERSIONS = """
import json
from importlib.metadata import distributions
print(json.dumps([[each.name.lower().replace("_", "-"), each.version] for each in distributions()]))
"""
