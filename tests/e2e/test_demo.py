"""The demo as a user runs it: real processes, real learning, and the reward as the witness of what engines serve.

The runs are shorter than the demo's own, just long enough for climbing to be beyond doubt.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from refitd_embedded.demo import DemoOptions, main
from refitd_embedded.demo.policy import CHANCE
from refitd_embedded.demo.rollouts import TOLERANCE
from support.forked_children import forked_children

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 12
DEMO = [sys.executable, "-m", "refitd_embedded.demo", "--json"]


Demo = Callable[..., tuple[int, list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str]) -> Demo:
    """Runs it in this process, its children in theirs, which are forked: exit status, rows, summary."""

    def run(**options: Any) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        with forked_children():
            status = main(DemoOptions(json=True, **options))
        said = capsys.readouterr()
        lines = [json.loads(line) for line in said.out.splitlines()]
        assert lines, said.err
        return status, lines[:-1], lines[-1]

    return run


@contextmanager
def running(*words: str) -> Generator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo that has taken its first step, and the processes that it started. Gone at the end, pass or fail."""
    # Its own group, as a terminal gives it: the signals of these tests are for the demo alone.
    started = subprocess.Popen([*DEMO, "--steps", "1000", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, process_group=0)  # fmt: skip
    children: list[psutil.Process] = []
    try:
        assert started.stdout is not None
        assert json.loads(started.stdout.readline())["step"] == 0
        children += psutil.Process(started.pid).children(recursive=True)
        yield started, children
    finally:
        for process in (started, *children):
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        started.communicate()


def test_engines_learn_and_one_that_is_killed_comes_back_to_the_current_step_and_a_nan_reaches_none(demo: Demo) -> None:
    status, lines, summary = demo(steps=STEPS)
    assert status == 0, lines
    rows = [line for line in lines if line["kind"] == "step"]
    assert summary["climbed"]
    assert rows[0]["reward"] < 3 * CHANCE
    assert rows[-1]["reward"] > 6 * CHANCE
    assert all(row["difference"] < TOLERANCE for row in rows)
    killed_at, nan_at = 3, 8
    assert [row["staleness"] for row in rows] == [int(row["step"] == nan_at) for row in rows]
    assert None in rows[killed_at]["served_by"].values()
    killed, broken, rolled_back = summary["incidents"]
    assert (killed["step"], killed["what"], killed["as_promised"]) == (killed_at, "engine-b was killed", True)
    assert killed["ended"].startswith("back on step ")
    assert (broken["step"], broken["ended"]) == (nan_at, "REJECTED, and no engine loaded it")
    assert (rolled_back["step"], rolled_back["as_promised"]) == (STEPS, True)
    assert rolled_back["ended"].startswith(f"all engines serve step {STEPS - 1} ")
    assert any("has 1 non-finite value" in line["text"] for line in lines if line["kind"] == "told")
    counted = summary["versions"]
    assert (counted["published"], counted["served"], counted["rejected"]) == (STEPS + 1, STEPS, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_leaves_nothing_behind(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running() as (started, children):
        assert len(children) == 3
        assert len(list(tmp_path.glob("refitd-demo-*"))) == 1
        started.send_signal(number)
        assert started.wait(60) == status
        assert not [child for child in children if child.is_running()]
    assert list(tmp_path.glob("refitd-demo-*")) == []
