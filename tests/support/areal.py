"""The released AReaL in an environment of its own."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from .servers import AREAL_VENV

TRAIN = Path(__file__).resolve().parents[2] / "examples/areal/train.py"
KILLED = Path(__file__).resolve().parents[1] / "areal/killed_train.py"
_SECONDS = 300.0


def released_areal(how: str, url: str, tmp_path: Path, *models: Path) -> list[dict[str, Any]]:
    """Run AReaL's part in its own environment, as the page says; what it saw at the start and after each update."""
    command = _command(how, tmp_path, *models)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(url), cwd=tmp_path)
    found = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0])


def killed_areal(tensors: int, how: str, url: str, tmp_path: Path, *models: Path) -> None:
    """The same, killed when it has broadcast so many tensors. What it has begun beside itself ends with the test."""
    python, *words = _command(how, tmp_path, *models)
    command = [python, *words[:2], str(KILLED), str(tensors), *words[2:]]
    with (tmp_path / "killed.log").open("wb") as log, subprocess.Popen(
        command, stdout=log, stderr=log, env=_environment(url), cwd=tmp_path, start_new_session=True
    ) as trainer:  # fmt: skip
        try:
            status = trainer.wait(_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # it has begun nothing
                os.killpg(trainer.pid, signal.SIGKILL)
    assert status == -signal.SIGKILL, (tmp_path / "killed.log").read_text()[-3000:]


def _command(how: str, tmp_path: Path, *models: Path) -> list[str]:
    python = Path(AREAL_VENV or "").absolute() / "bin/python"
    places = [str(tmp_path / "name_resolve"), str(tmp_path / "fileroot")]
    return [str(python), "-W", "ignore", str(TRAIN), how, *places, *map(str, models)]


def _environment(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"AREAL_LLM_SERVER_ADDRS": url.removeprefix("http://")}
