"""What `make` promises, and that the version of torch is written in one place and pinned for nobody else."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
VERBS = [
    "help",
    "demo",
    "unit",
    "test",
    "reliability",
    "thorough",
    "check",
    "simulation",
    "fuzz",
    "soak",
    "chaos",
    "bench",
    "bench-gpu",
]
VERBS += [
    "sglang",
    "vllm",
    "stores",
    "core",
    "lowest",
    "areal",
    "trainers",
    "plugin-releases",
    "browser",
    "screenshots",
    "demo-svg",
]
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
    ignored = {line.strip("/") for line in (TREE / ".gitignore").read_text().split()}
    assert {name for line in removed for name in line.split()} <= ignored


def test_make_thorough_runs_in_the_same_folders_what_make_test_and_make_reliability_leave_out() -> None:
    recipes = re.findall(r"^\w+: (?:.+\n)+", (TREE / "Makefile").read_text(), re.MULTILINE)
    test, reliability, rest = (
        next(each for each in recipes if each.startswith(f"{verb}: ")) for verb in ("test", "reliability", "thorough")
    )
    quick = test + reliability
    folders = set(re.findall(r" (tests/\w+)(?= |$)", quick, re.MULTILINE)) - {
        "tests/postgres/install",
        "tests/prometheus/install",
        "tests/stage",
    }
    assert folders - {"tests/unit"} == set(re.findall(r" (tests/\w+)(?= )", rest)) - {"tests/stage"}
    assert not [file for file in (TREE / "tests/unit").rglob("*.py") if "pytest.mark.thorough" in file.read_text()]
    stages = [line for line in quick.splitlines() if "tests/stage " in line]
    assert all("-m '$(QUICK)'" in line for line in stages)
    assert "QUICK = not thorough and not sglang and not vllm and not stores\n" in (TREE / "Makefile").read_text()
    assert "-m '(thorough or points) and not sglang and not vllm and not stores'" in rest


def test_make_vllm_runs_in_all_folders_that_have_tests_of_a_real_vllm() -> None:
    """It collects those alone: what is collected from all of `tests` takes a third of a minute."""
    recipes = (TREE / "Makefile").read_text().split("\n\n")
    recipe = next(each for each in recipes if each.startswith("vllm: "))
    folders = [TREE / name for name in re.findall(r" (tests/\w+(?:/\w+)?)(?= )", recipe)]
    marked = [
        file for file in (TREE / "tests").rglob("*.py") if re.search(r'(?<!")pytest\.mark\.vllm', file.read_text())
    ]
    assert marked
    assert not [file for file in marked if not any(file.is_relative_to(folder) for folder in folders)]


def test_ci_runs_the_verbs_that_a_person_runs() -> None:
    script = (TREE / ".ci/run").read_text()
    lanes = " ".join(
        " ".join(re.findall(r'"([^"]+)"', line)) for line in re.findall(r"^beside .*$", script, re.MULTILINE)
    )
    verbs = {"check", "docs", "test", "reliability", "thorough", "simulation", "fuzz", "browser"}
    others = {"sglang", "vllm", "stores", "core", "lowest", "areal", "trainers", "venv", "chromium", "environments"}
    assert set(lanes.split()) == verbs | others
    assert '*) make "$1" ;;' in script


def test_ci_takes_of_reliability_all_but_the_points_that_thorough_takes_whole() -> None:
    script = (TREE / ".ci/run").read_text()
    assert """reliability) make reliability "$again -m 'not (thorough or points or sglang)'" ;;""" in script
    assert "-m '(thorough or points) and not sglang and not vllm and not stores'" in (TREE / "Makefile").read_text()


def test_the_workflow_runs_verbs_alone_each_with_the_python_of_its_job() -> None:
    """Without PYTHON, make would take the newest Python of the machine in each of the jobs."""
    workflow = (TREE / ".github/workflows/ci.yml").read_text()
    runs = re.findall(r"^ +- run: (.+)$", workflow, re.MULTILINE)
    assert runs == ["make ${{ matrix.verb }}", "make unit"]
    assert set(re.findall(r"\w+", re.findall(r"verb: \[(.+)\]", workflow)[0])) <= set(VERBS)
    assert re.search(r"^env:\n(?:  .+\n)*  PYTHON: python\b", workflow, re.MULTILINE)


STUB = """#!/bin/bash
trap 'echo "$1 was interrupted" >> interrupted; exit 130' INT
if [ "$1" = sglang ]; then touch begun; read -r -t 60 < never || true; fi
if [ "$1" = thorough ]; then until [ -e begun ]; do read -r -t 0.01 < never || true; done; fi
echo "made $*"
[ "$1" != thorough ]
"""


def test_ci_ends_the_other_lane_when_a_verb_fails_and_prints_what_that_verb_said_last(tmp_path: Path) -> None:
    """With a `make` that only says what it is asked for, one verb that fails, and one that would take a minute."""
    for name in ("prometheus", "browser", "sglang", "vllm", "areal", "trainers"):
        place = tmp_path / "tests" / name
        place.mkdir(parents=True)
        (place / "install").write_text("#!/bin/bash\n")
        (place / "install").chmod(0o755)
    for folder, name, text in ((".ci", "run", (TREE / ".ci/run").read_text()), ("bin", "make", STUB)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        (tmp_path / folder / name).chmod(0o755)
    os.mkfifo(tmp_path / "never")
    waits = os.open(tmp_path / "never", os.O_RDWR)  # a reader of it waits
    try:
        said = subprocess.run(
            [tmp_path / ".ci/run"],
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(waits)
    assert said.returncode == 1
    assert said.stdout.endswith("==== thorough FAILED ====\nmade thorough ARGS=--reruns 1 --rerun-show-tracebacks\n")
    assert "made check" in said.stdout
    assert "made sglang" not in said.stdout
    assert (tmp_path / "interrupted").read_text() == "sglang was interrupted\n"


def test_a_stage_says_in_one_line_how_it_ended_and_shows_what_it_printed_only_when_it_fails() -> None:
    def said(command: str, status: int) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name != "V"}
        order = [TREE / "tests/stage", "unit", "bash", "-c", command]
        done = subprocess.run(order, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status
        return [re.sub(r" +\d+ s ", " S ", line) for line in done.stdout.splitlines()]

    assert said("echo ....; echo '4 passed in 1.23s'", 0) == ["unit S  4 passed"]
    assert said("echo trace; echo '1 failed, 3 passed in 1.23s'; exit 1", 1)[:2] == [
        "unit S  1 failed, 3 passed",
        "trace",
    ]
    assert said("echo trace; echo '4 passed, 1 rerun in 1.23s'", 0)[1] == "trace", "it is a test to be mended"
    assert said("exit 2", 2) == ["unit S  exit status 2"]


def beside(folder: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    words = [word for command in commands for word in ("+", "bash", "-c", command)][1:]
    return subprocess.run([TREE / "tests/beside", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_stages_run_side_by_side_and_the_first_that_fails_ends_the_others(tmp_path: Path) -> None:
    for name in ("one", "two", "begun", "never"):
        os.mkfifo(tmp_path / name)  # who opens one waits for the other end
    assert beside(tmp_path, "echo > one; read < two; exit 0", "read < one; echo > two").returncode == 0
    waits = os.open(tmp_path / "never", os.O_RDWR)
    try:
        waiting = "trap 'echo interrupted; exit 130' INT; echo > begun; read -t 60 < never"
        failed = beside(tmp_path, waiting, "read < begun; exit 3")
    finally:
        os.close(waits)
    assert (failed.returncode, failed.stdout) == (1, "interrupted\n")
