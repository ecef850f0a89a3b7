"""A test that hangs ends, and what it waits for is seen, also where its first failure took pytest's own timer away."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HANGING = """
import signal, threading
from pathlib import Path
import pytest

def waits():
    threading.Event().wait()

@pytest.fixture
def left_open():
    yield
    waits()

def test_in_its_teardown(left_open):
    assert False

def test_when_it_runs_again():
    if Path("ran").exists():
        waits()
    Path("ran").touch()
    assert False

def test_where_no_signal_arrives():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    waits()

def test_other():
    pass
"""


@pytest.mark.thorough
def test_what_hangs_ends_and_says_where_it_waited_and_other_tests_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from support.phase_limit import *")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    order = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--reruns", "1", "--timeout", "1", "--rootdir", "."]
    given = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(order, check=False, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "3 failed, 1 passed" in done.stdout
    waited = re.findall(r'File ".*test_hanging\.py", line \d+ in waits\n.* in (\w+)\n', done.stderr)
    assert set(waited) == {"left_open", "test_when_it_runs_again", "test_where_no_signal_arrives"}
