"""Children of the demo: waited for, explained when they die, and never left behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from refitd_embedded.demo import processes
from refitd_embedded.demo.processes import Child, ProcessError, Stack


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child`, for a test to write, that `python -m` finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child.py"


def pid_of(child: Child) -> int:
    assert child._process is not None
    return child._process.pid


def test_a_child_is_ready_when_it_says_so_and_gone_at_the_end(module: Path, tmp_path: Path) -> None:
    module.write_text("import time\nprint('child ready on http://127.0.0.1:1', flush=True)\ntime.sleep(600)")
    with Child("child", ["child"], tmp_path) as child:
        assert child.url() == "http://127.0.0.1:1"
        assert os.getpgid(pid_of(child)) == pid_of(child)  # Ctrl-C in the terminal does not reach it
        child.check()
    assert not psutil.pid_exists(pid_of(child))


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


def test_settings_of_the_users_own_service_do_not_reach_the_children(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFITD_ENGINES", "http://production:30000")
    module.write_text("import os\nprint(sorted(name for name in os.environ if name.startswith('REFITD_')))")
    with Child("child", ["child"], tmp_path) as child, pytest.raises(ProcessError, match=r"\[\]"):
        child.url()


def test_a_stack_is_checked_child_by_child(module: Path, tmp_path: Path) -> None:
    module.write_text("")
    with Child("engine-b", ["child"], tmp_path) as child:
        assert child._process is not None
        child._process.wait()
        stack = Stack(service_url="", engines=(), root=tmp_path, children=(child,))
        with pytest.raises(ProcessError, match="engine-b ended with status 0"):
            stack.check()
