"""What takes its time says how far it is, to a person at a terminal; a script hears nothing of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import write_model
from support.stand_in_service import stand_in

pytestmark = [pytest.mark.e2e]

REFITD = (sys.executable, "-m", "refitd")


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
