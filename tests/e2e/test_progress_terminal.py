"""What takes its time says how far it is, to a person at a terminal; a script hears nothing of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from refitd_client.contract.states import VersionState, WaitOutcome
from refitd_client.contract.wire import Notice, Reclaimable, ReclaimPlan
from support.checkpoints import publish, tensors, write_model
from support.stand_in_service import make_engine, stand_in
from support.terminal import terminal

pytestmark = [pytest.mark.e2e]

REFITD = (sys.executable, "-m", "refitd")


def test_publishing_shows_bytes_and_what_is_waited_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "root").mkdir()
    with stand_in() as service:
        service.engines = [make_engine("slow", step=None)]
        service.outcomes = [WaitOutcome.PENDING]
        words = ("--root", str(tmp_path / "root"), "--run", "run", "--step", "1", "--wait", "--timeout", "30")
        with terminal(*REFITD, "publish", str(model), *words, "--url", service.url) as shown:
            assert "writing" in shown.until("writing")
            shown.until("waiting for slow")
            service.outcomes = [WaitOutcome.SERVED]
            shown.until("is served")


def test_deleting_shows_how_much_is_gone() -> None:
    line = Reclaimable(path="exp/v000001", keep=False, reasons=["old"], version="exp~v000001", bytes=4_000_000)
    with stand_in() as service:
        service.plan = ReclaimPlan(items=[line], freed_bytes=4_000_000)
        with terminal(*REFITD, "reclaim", "--yes", "--url", service.url) as shown:
            assert "4.0 MB" in shown.until(r"deleting.*4\.0 MB")


def test_a_check_of_every_byte_shows_how_much_it_has_read(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    root.mkdir()
    publish(root, "run", 1, tensors(1))
    keep_a_journal_of(root, state)
    words = ("doctor", "--root", str(root), "--state", str(state), "--deep")
    with terminal(*REFITD, *words, COLUMNS="120") as shown:
        shown.until(r"doctor.*\d/\d+")
        assert shown.child.wait(10) == 0


def keep_a_journal_of(root: Path, state: Path) -> None:
    """A service that has sealed what is in the root, and was stopped."""
    from refitd_client import RefitClient
    from support.servers import RefitdServer

    base = write_model(root.parent / "base")
    folder = state.parent
    with RefitdServer(folder, root, [], "--base-model", str(base)) as refitd, RefitClient(refitd.url) as client:
        client.announce(Notice(run="run", step=1))  # its own look at the root may come later
        assert client.wait("run~v000001", "sealed", 30).version.state is VersionState.SEALED


@pytest.mark.parametrize("command", ["publish", "reclaim"])
def test_a_script_gets_the_answer_and_nothing_else(command: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "root").mkdir()
    words = {
        "publish": ("publish", str(model), "--root", str(tmp_path / "root"), "--run", "run", "--step", "1"),
        "reclaim": ("reclaim", "--yes"),
    }[command]
    with stand_in() as service:
        done = subprocess.run(
            [*REFITD, *words, "--url", service.url], capture_output=True, text=True, check=True, env={"PATH": ""}
        )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
