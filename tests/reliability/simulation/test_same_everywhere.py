"""The simulation's cases are the same in every clone: in whatever folder, beside whatever else, in whatever order."""

import ast
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import test_simulation
from simulation.cases import Case, drawn, played, shortest

ROOT = Path(__file__).parents[3]
PARTS = (
    "client/refitd_client",
    "service/refitd",
    "service/refitd_plugin",
    "service/refitd_sglang",
    "tests/reliability/simulation",
    "tests/support",
)
CASES, PLAYED = 240, 3

SAYS = """
import logging, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
from simulation.test_same_everywhere import digest
print(digest())
"""


def digest() -> str:
    """Of the steps of the fixed cases, and of what happened in the first few."""
    said = [str(drawn(seed)) for seed in range(CASES)]
    for seed in range(PLAYED):
        said += played(drawn(seed)).world.trace
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def digest_in(folder: Path, before: str, **environment: str) -> str:
    """What a clone in a folder says, in a process that does something else `before`."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join(str(folder / part) for part in ("client", "service", "tests", "tests/reliability"))
    told = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{SAYS}"], cwd=folder, env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_clones_take_the_same_steps_and_see_the_same_happen(tmp_path: Path) -> None:
    """One lies in a folder named test, of which tools think that they know what is in it."""
    one = digest_in(tmp_path / "test" / "clone", "", PYTHONHASHSEED="1")
    other = digest_in(tmp_path / "elsewhere", "import random, hypothesis; random.seed(7)", PYTHONHASHSEED="2")
    assert one == other


def test_a_seed_gives_one_case_and_another_seed_another() -> None:
    random.seed(1)
    first = [drawn(seed) for seed in range(20)]
    random.seed(2)
    assert first == [drawn(seed) for seed in range(20)]
    assert len({str(case) for case in first}) == 20


def test_a_case_that_fails_is_left_with_the_steps_that_it_takes() -> None:
    case = drawn(1)
    guilty = [case.steps[7], case.steps[23]]

    def fails(shorter: Case) -> bool:
        return all(any(step is each for step in shorter.steps) for each in guilty)

    assert list(shortest(case, fails).steps) == guilty


def test_a_case_that_fails_says_how_to_have_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its seed, and by its steps as Python, to be put among the cases that were found."""

    def fail(case: Case) -> None:
        raise AssertionError(f"11: {case.seed} does not hold")

    monkeypatch.setattr(test_simulation, "played", fail)
    monkeypatch.setattr(test_simulation, "FIRST", 7)
    with pytest.raises(AssertionError) as caught:
        test_simulation.test_every_promise_holds_under_whatever_comes(0)
    (note,) = caught.value.__notes__
    said, _, steps = note.partition("\n")
    assert said == "to have it again: make simulation SEED=7 STEPS=1"
    assert steps == str(drawn(7))
    ast.parse(steps)


def test_make_simulation_begins_with_another_case_each_time_unless_it_is_told_which() -> None:
    drawn_by_make = {first_case_of() for _ in range(2)}
    assert len(drawn_by_make) == 2
    assert first_case_of("SEED=7") == "7"
    assert re.search(r"^beside .*\bsimulation\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def first_case_of(*arguments: str) -> str:
    order = ["make", "--dry-run", "simulation", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in {"SEED", "MAKEFLAGS"}}
    done = subprocess.run(order, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (seed,) = re.findall(r"seed=(\d+);", done.stdout)
    return seed
