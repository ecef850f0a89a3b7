"""What `make` promises, and that the version of torch is written in one place and pinned for nobody else."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
VERBS = [
    "help",
    "demo",
    "test",
    "check",
    "simulation",
    "fuzz",
    "soak",
    "chaos",
    "bench",
    "bench-paint",
    "bench-gpu",
    "bench-gpu2",
    "bench-plan",
]
VERBS += ["density", "sglang", "areal", "plugin-releases", "browser", "screenshots"]
VERBS += ["docs", "docs-links", "reference", "clean"]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_make_alone_lists_every_verb_on_a_line_of_its_own() -> None:
    said = subprocess.run(["make", "--no-print-directory"], cwd=TREE, capture_output=True, text=True, check=True).stdout
    lines = [re.fullmatch(r"make ([\w-]+) +\S.*", line) for line in said.splitlines()]
    assert [line and line[1] for line in lines] == VERBS


def test_every_verb_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (TREE / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert phony[1].split() == VERBS


@needs_make
def test_clean_removes_only_what_make_made() -> None:
    said = subprocess.run(["make", "-n", "clean"], cwd=TREE, capture_output=True, text=True, check=True).stdout
    removed = re.findall(r"^rm -rf (.+)$", said, re.MULTILINE)
    ignored = {line.rstrip("/") for line in (TREE / ".gitignore").read_text().split()}
    assert {name for line in removed for name in line.split()} <= ignored


def test_ci_runs_the_verbs_that_a_person_runs() -> None:
    script = (TREE / ".ci/run").read_text()
    assert "for verb in check docs test simulation fuzz browser sglang areal; do" in script
    assert 'make "$verb" < /dev/null ;;' in script


def test_ci_takes_what_simulation_and_fuzzers_find_the_first_time() -> None:
    arm = re.search(r"^ +(.+)\) make \"\$verb\" \"\$again\"", (TREE / ".ci/run").read_text(), re.MULTILINE)
    assert arm is not None
    assert arm[1].split(" | ") == ["test", "browser", "sglang", "areal"]


def test_the_package_pins_torch_for_nobody() -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]
    wanted = {
        name for extra in project["optional-dependencies"].values() for name in extra if re.match(r"torch\b", name)
    }
    assert wanted
    assert all(re.fullmatch(r"torch>=[\d.]+", name) for name in wanted)


def test_the_version_of_torch_is_written_in_one_place() -> None:
    version = re.findall(r"^torch==([\d.]+)$", (TREE / "constraints.txt").read_text(), re.MULTILINE)
    assert len(version) == 1
    for name in ("Makefile", "deploy/Dockerfile", "deploy/install-torch", "deploy/make-venv"):
        assert version[0] not in (TREE / name).read_text(), name


def test_a_place_without_python_is_told_what_to_install(tmp_path: Path) -> None:
    said = subprocess.run(
        [TREE / "deploy/make-venv", tmp_path / "venv"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1
    assert "apt-get install python3 python3-venv" in said.stderr
    assert said.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_an_environment_that_make_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").touch()
    said = subprocess.run([TREE / "deploy/make-venv", tmp_path / "venv"], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "make clean" in said.stderr
    assert (tmp_path / "venv" / "mine").exists()
