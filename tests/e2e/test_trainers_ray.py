"""A plain Ray job: what its trainer actor publishes, its engine actors serve."""

from pathlib import Path

import pytest

from support.trainers import EXAMPLES, lines_of, run_there

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]


def test_the_engines_of_a_ray_job_serve_what_its_trainer_publishes(tmp_path: Path) -> None:
    steps = lines_of(run_there(EXAMPLES / "ray/train.py", tmp_path))
    assert [(step["step"], step["engines"]) for step in steps] == [(n, [f"exp~ray~v00000{n}"] * 2) for n in (1, 2, 3)]
    for step in steps:
        first, second = step["servers"]
        assert first == second
        assert first["serves"] == str(step["step"])
