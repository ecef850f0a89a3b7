"""Breaks the product in one place at a time, and sees that the tests notice: a promise that no test can lose is none.

Each mutant is a line of the product and what it becomes; the tests that are named must fail on it. They run in a copy.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
NOT_COUNTED = {0, 2, 3, 4, 5}  # passed, or not run at all: interrupted, internal error, usage, nothing collected


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_notice_a_product_that(mutant: Mutant, tmp_path: Path) -> None:
    for part in ("service", "client"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))  # tests/repository: the line is there once
    path = os.pathsep.join(str(tmp_path / part) for part in ("service", "client"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "REFITD_SIMULATION_STEPS": "4000", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode not in NOT_COUNTED, f"nobody noticed:\n{done.stdout[-2000:]}"
