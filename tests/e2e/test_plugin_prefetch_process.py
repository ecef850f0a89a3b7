"""The process that reads for a rank: it is begun, killed, held up and left behind, and versions are prepared all the
same.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import save_file

from refitd_client.validation.contents import ReadingStoppedError
from refitd_plugin import prefetch
from refitd_plugin.port import Stages
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank, version

pytestmark = pytest.mark.timeout(120)
SOON = 60.0


@pytest.fixture
def rank(tmp_path: Path) -> Generator[Rank]:
    """With a prefetch worker that has answered."""
    startup = tmp_path / "startup"
    startup.mkdir()
    save_file(tiny_weights(0), startup / "model.safetensors")
    rank = Rank(startup)
    rank.engine.preparing.worker.begin()
    yield rank
    rank.engine.preparing.worker.end()


def by_worker(rank: Rank, folder: Path) -> bool:
    """Whether a prefetch worker did it."""
    stages = Stages()
    rank.engine.prepare(str(folder), stages=stages)
    return "clerk" in stages.ms


def test_it_imports_neither_torch_nor_sglang(rank: Rank, root: Path) -> None:
    assert by_worker(rank, version(root, 1))
    libraries = Path(f"/proc/{rank.engine.preparing.worker.pid}/maps").read_text()
    assert "libtorch" not in libraries


def test_one_that_is_killed_is_begun_again_and_holds_up_nothing(
    rank: Rank, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, its = version(root, 1), rank.engine.preparing.worker
    assert by_worker(rank, one)
    first = its.pid
    monkeypatch.setattr(prefetch, "_BEGIN_AGAIN_SECONDS", 0.0)
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=0)
    assert not by_worker(rank, one)
    assert by_worker(rank, one)
    assert its.pid != first


def test_one_that_hangs_is_let_go_of_when_nobody_wants_its_version_any_more(
    rank: Rank, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, its = version(root, 1), rank.engine.preparing.worker
    assert by_worker(rank, one)
    monkeypatch.setattr(prefetch, "_STOP_REPLY_SECONDS", 0.05)
    hung, stop = psutil.Process(its.pid), threading.Event()
    hung.suspend()
    stop.set()
    with pytest.raises(ReadingStoppedError):
        rank.engine.prepare(str(one), stop=stop)
    assert psutil.wait_procs([hung], timeout=SOON)[0]


def test_it_ends_with_its_rank(tmp_path: Path) -> None:
    code = (
        "from refitd_plugin.prefetch import PrefetchWorker; import sys, time\n"
        "worker = PrefetchWorker(); worker.begin(); print(worker.pid, flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    gone, _ = psutil.wait_procs([worker], timeout=SOON)
    assert gone


def test_where_no_process_can_be_begun_a_thread_reads(tmp_path: Path, root: Path, rank: Rank) -> None:
    rank.engine.preparing.worker.end()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no process may be begun")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "_BEGIN_AGAIN_SECONDS", 0.0)
        patch.setattr(prefetch, "subprocess", SimpleNamespace(Popen=refuse, DEVNULL=subprocess.DEVNULL))
        began = time.monotonic()
        assert not by_worker(rank, version(root, 1))
        assert time.monotonic() - began < SOON
