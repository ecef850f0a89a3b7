"""Children of the demo: waited for, explained when they die, and never left behind."""

import signal
from pathlib import Path

import psutil
import pytest

from refitd_embedded.demo import processes
from refitd_embedded.demo.processes import Child, ProcessError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child`, for a test to write, that `python -m` finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child.py"


def pid_of(child: Child) -> int:
    assert child._process is not None
    return child._process.pid


def test_a_child_that_dies_is_explained_by_the_end_of_its_log(module: Path, tmp_path: Path) -> None:
    module.write_text("import sys\nprint('about to fail', flush=True)\nsys.exit('no such checkpoint')")
    with (
        Child("engine-a", ["child"], tmp_path) as child,
        pytest.raises(ProcessError, match=r"(?s)engine-a ended with status 1.*about to fail.*no such checkpoint"),
    ):
        child.url()


def test_a_child_that_is_never_ready_is_not_waited_for_for_ever(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    module.write_text("import time\ntime.sleep(600)")
    with Child("child", ["child"], tmp_path) as child, pytest.raises(ProcessError, match="not ready after 0 s"):
        child.url()
    assert not psutil.pid_exists(pid_of(child))


def test_a_child_that_ignores_the_request_to_stop_is_killed(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.1)
    module.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('child ready on http://127.0.0.1:1', flush=True)\ntime.sleep(600)"
    )
    with Child("child", ["child"], tmp_path) as child:
        child.url()
    assert not psutil.pid_exists(pid_of(child))
    assert child._process is not None
    assert child._process.returncode == -signal.SIGKILL
