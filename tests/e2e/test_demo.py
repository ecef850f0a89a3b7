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

from refitd_client import RefitClient
from refitd_embedded.demo import DemoOptions, main
from refitd_embedded.demo.policy import CHANCE, fresh, write
from refitd_embedded.demo.processes import Stack, own_stack
from refitd_embedded.demo.rollouts import TOLERANCE
from refitd_embedded.weights import load
from support.forked_children import forked_children

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 12
VERSION_BYTES = 1_700_000
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


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    """A service and two engines that go on when a trainer has ended, so that each trainer is a restarted one."""
    folder = tmp_path_factory.mktemp("stack")
    with forked_children(), own_stack(folder, write(fresh(0), folder / "base")) as running:
        yield running
        running.check()


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


def test_with_stay_the_dashboard_is_up_until_ctrl_c_and_names_the_engines_as_the_table_does() -> None:
    words = [*DEMO, "--steps", "1", "--stay"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0) as demo:
        assert demo.stderr is not None
        try:
            said = next(line for line in demo.stderr if "stay until Ctrl-C" in line)
            children = psutil.Process(demo.pid).children(recursive=True)
            with RefitClient(said.split()[-1]) as client:
                assert [engine.id for engine in client.engines().items] == ["engine-a", "engine-b"]
            demo.send_signal(signal.SIGINT)
            demo.wait(30)
            assert not [child for child in children if child.is_running()]
        finally:
            demo.kill()


def named(children: list[psutil.Process], *words: str) -> list[psutil.Process]:
    return [child for child in children if all(word in child.cmdline() for word in words)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_publishing_the_engines_learn_and_serve_exactly_what_they_claim(
    seed: int, demo: Demo, stack: Stack
) -> None:
    status, rows, summary = demo(
        steps=STEPS, seed=seed, service_url=stack.service_url, engines=stack.engines, root=stack.root
    )
    assert status == 0
    assert summary["climbed"]
    assert rows[0]["reward"] < 3 * CHANCE
    assert rows[-1]["reward"] > 6 * CHANCE
    assert [row["step"] for row in rows] == [row["served"] for row in rows] == list(range(STEPS + 1))
    assert all(row["served_by"] == dict.fromkeys(stack.engines, row["step"]) for row in rows)
    assert all(row["staleness"] == 0 and row["publish_ms"] > 0 and row["refit_ms"] > 0 for row in rows)
    assert all(row["difference"] < TOLERANCE for row in rows)
    assert summary["versions"]["published"] == summary["versions"]["served"] == STEPS + 1
    assert summary["versions"]["collected"] > 0
    assert rows[-1]["disk_bytes"] < 8 * VERSION_BYTES


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
    killed, broken = summary["incidents"]
    assert (killed["step"], killed["what"], killed["as_promised"]) == (killed_at, "engine-b was killed", True)
    assert killed["ended"].startswith("back on step ")
    assert (broken["step"], broken["ended"]) == (nan_at, "REJECTED, and no engine loaded it")
    assert any("has 1 non-finite value" in line["text"] for line in lines if line["kind"] == "told")
    counted = summary["versions"]
    assert (counted["published"], counted["served"], counted["rejected"]) == (STEPS + 1, STEPS, 1)


@pytest.mark.thorough
def test_without_publishing_the_engines_stay_where_they_started(demo: Demo) -> None:
    status, rows, summary = demo(publish=False, steps=STEPS)
    assert status == 0
    assert not summary["climbed"]
    assert all(row["reward"] < 3 * CHANCE for row in rows)
    assert [row["staleness"] for row in rows] == list(range(STEPS + 1))
    assert all(row["served"] == 0 and row["publish_ms"] is None for row in rows)
    assert summary["versions"] == {"published": 0, "served": 0, "rejected": 0, "collected": 0}


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


@pytest.mark.thorough
def test_an_engine_that_dies_ends_the_run_with_its_name() -> None:
    with running() as (started, children):
        engine = named(children, "refitd_embedded")[0]
        engine.kill()
        _, errors = started.communicate(timeout=60)
        assert started.returncode == 2
        assert "ended with status -9" in errors
        assert "engine-" in errors
        assert not [child for child in children if child.is_running()]


def test_the_first_policy_is_a_checkpoint_that_is_written_by_one_command(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "refitd_embedded.demo.policy", "--out", str(tmp_path / "base"), "--seed", "3"],
        check=True,
        capture_output=True,
    )
    written, drawn = load(tmp_path / "base").state_dict(), fresh(3).state_dict()
    assert all(bool((written[name] == drawn[name]).all()) for name in drawn)
    assert 200_000 < sum(tensor.numel() for tensor in drawn.values()) < 500_000
