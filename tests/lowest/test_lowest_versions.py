"""The floors in pyproject.toml are true: a service and its commands run with these very versions, and nothing else."""

import json
import os
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer, RefitdProgram

pytestmark = pytest.mark.e2e

TREE = Path(__file__).parents[2]
PYTHON = str(Path(os.environ.get("REFITD_LOWEST_VENV", "")).absolute() / "bin/python")
FROM_HERE = {"PYTHONPATH": f"{TREE / 'client'}:{TREE / 'service'}"}
RUN = "run"


class LowestServer(RefitdProgram):
    """`refitd serve` in the environment of the lowest versions."""

    def command(self, port: int) -> Sequence[str]:
        return [PYTHON, *super().command(port)[1:]]

    def environment(self) -> dict[str, str]:
        return super().environment() | FROM_HERE


def in_lowest(*words: str, url: str = "") -> str:
    """Run a program there, and return what it prints."""
    environment = os.environ | FROM_HERE | {"REFITD_URL": url}
    done = subprocess.run([PYTHON, *words], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def service(tmp_path: Path, models: Path) -> Generator[LowestServer]:
    for name in ("root", "engine", "service"):
        (tmp_path / name).mkdir()
    keys: list[str] = []
    for flag, key in (("--engine-key-file", API_KEY), ("--engine-admin-key-file", ADMIN_KEY)):
        (tmp_path / flag).write_text(key)
        keys += [flag, str(tmp_path / flag)]
    with (
        EmbeddedServer(tmp_path / "engine", models / "model_a") as engine,
        LowestServer(tmp_path / "service", tmp_path / "root", [engine.url], *keys, "--insecure") as service,
    ):
        yield service


def test_the_lowest_versions_publish_update_roll_back_diagnose_and_collect(
    service: LowestServer, tmp_path: Path, models: Path
) -> None:
    def refitd(*words: str) -> str:
        return in_lowest("-m", "refitd", *words, url=service.url)

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
    there = dict(json.loads(in_lowest("-c", _VERSIONS)))
    for line in (TREE / "deploy/locks/lowest.txt").read_text().splitlines():
        name, is_pin, version = line.partition(" ")[0].partition("==")
        if is_pin and ";" not in line:
            assert there[name.replace("_", "-")] == version


_VERSIONS = """
import json
from importlib.metadata import distributions
print(json.dumps([[each.name.lower().replace("_", "-"), each.version] for each in distributions()]))
"""
