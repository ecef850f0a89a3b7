"""One publisher a run, for exactly as long as it lives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refitd_client import RunBusyError, WeightPublisher
from refitd_client.publish.run_folder import LOCK_NAME


def test_a_second_publisher_is_told_who_has_the_run(tmp_path: Path) -> None:
    """By process and host."""
    with WeightPublisher(tmp_path, "run"), pytest.raises(RunBusyError) as caught:
        WeightPublisher(tmp_path, "run")
    assert caught.value.pid == os.getpid()
    assert f"process {os.getpid()} on {os.uname().nodename}" in str(caught.value)


def test_a_second_publisher_is_told_what_to_do_about_the_lock_and_what_not(tmp_path: Path) -> None:
    """Deleting a lock's file frees nothing, and lets two publish."""
    with WeightPublisher(tmp_path, "run"), pytest.raises(RunBusyError) as caught:
        WeightPublisher(tmp_path, "run")
    told = str(caught.value)
    assert "close that publisher or end its process, or use another run name" in told
    assert f"The lock {tmp_path / 'run' / LOCK_NAME} is free as soon as that process has ended: do not delete" in told
    with WeightPublisher(tmp_path, "other") as publisher:
        lock = tmp_path / "other" / LOCK_NAME
        lock.write_text('{"pid": 4711, "host": "node3"}')
        with pytest.raises(RunBusyError, match="end its process on node3, or use another run name"):
            WeightPublisher(tmp_path, "other")
        assert publisher is not None


def test_kill_9_frees_the_run(tmp_path: Path) -> None:
    """The kernel gives the lock back, whatever the file says."""
    script = f"""
import time
from refitd_client import WeightPublisher
publisher = WeightPublisher({str(tmp_path)!r}, "run")
print("open", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(RunBusyError, match=f"process {child.pid}"):
            WeightPublisher(tmp_path, "run")
        child.send_signal(signal.SIGKILL)
        child.wait()
    WeightPublisher(tmp_path, "run").close()


FORK = """
import os, sys
from refitd_client import PublishError, WeightPublisher
publisher = WeightPublisher(sys.argv[1], "run")
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    try:
        publisher.publish({}, step=1)
    except PublishError as error:
        assert "before a fork" in str(error), error
    publisher.close()
    os.write(ready[1], b".")
    os.close(go[1])
    os.read(go[0], 1)  # until the test is over: our copy of go[1] is the last
    os._exit(0)
os.read(ready[0], 1)
try:
    WeightPublisher(sys.argv[1], "run")
except Exception as error:
    print(type(error).__name__, flush=True)
publisher.close()
WeightPublisher(sys.argv[1], "run").close()
print("free", flush=True)
os.close(go[1])
os.waitpid(child, 0)
"""


def test_a_forked_child_neither_gives_the_lock_away_nor_keeps_it(tmp_path: Path) -> None:
    """Data loaders fork. The child cannot publish; its close changes nothing; it does not outlive its parent's lock."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, tmp_path],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == ["RunBusyError", "free"]
