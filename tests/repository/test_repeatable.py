"""The cases of property tests are the same in every clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SAYS = """
import hashlib, conftest, around
from hypothesis import given, settings, strategies as st
drawn = []
@settings(max_examples=400, database=None)
@given(st.integers(0, 2**32), st.floats(), st.text())
def draw(one, two, three):
    drawn.append(repr((one, two, three)))
draw()
print(hashlib.sha256("".join(drawn).encode()).hexdigest())
"""


def said_in(folder: Path, constants: range) -> str:
    """What is drawn beside a module with these constants."""
    folder.mkdir()
    (folder / "around.py").write_text(f"FOUND = {list(constants)}")
    path = os.pathsep.join([str(folder), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.thorough
def test_what_is_drawn_depends_neither_on_the_folder_nor_on_the_modules_around(tmp_path: Path) -> None:
    """Hypothesis draws constants from the modules that it takes for local, and in a folder named test it takes none."""
    one = said_in(tmp_path / "test", range(1000, 2000))
    assert one == said_in(tmp_path / "elsewhere", range(1000, 2000))
    assert one == said_in(tmp_path / "third", range(5000, 6000))
