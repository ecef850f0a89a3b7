"""`refitd areal` as a process, and the released AReaL in an environment of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .forked import Forked
from .jobs import RUN, TOKEN, Job
from .servers import AREAL_VENV, Server, forked_refitd

TRAIN = Path(__file__).resolve().parents[2] / "examples/areal/train.py"
KILLED = Path(__file__).resolve().parents[1] / "areal/killed_train.py"
_SECONDS = 300.0


class ArealServer(Server):
    """`refitd areal`."""

    name = "areal"
    ready = re.compile(rb"refitd areal: .* ready on http://127\.0\.0\.1:(\d+)$")

    def __init__(self, folder: Path, job: Job, *flags: str) -> None:
        super().__init__(folder)
        keys = folder / "keys"
        self._flags = ["--root", str(job.root), "--run", RUN, "--url", job.refitd.url, *flags]
        self._flags += [
            "--token-file",
            str(keys / "--token-file"),
            "--engine-key-file",
            str(keys / "--engine-key-file"),
        ]
        self._flags += ["--engine-admin-key-file", str(keys / "--engine-admin-key-file")]
        self._flags += ["--checkpoints", str(folder / "fileroot")]
        assert (keys / "--token-file").read_text() == TOKEN

    def facade_of(self, engine: str) -> str:
        """Where the facade of an engine is: known when it listens."""
        line = re.compile(rf"refitd areal: {re.escape(engine)} ready on (\S+)")
        for _ in range(600):
            if (found := line.search(self.log.read_text(errors="replace"))) is not None:
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"no facade of {engine}; the end of its log:\n{self.tail()}")

    def command(self, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "refitd", "areal", *self._flags]

    def _begun(self) -> Forked:
        return forked_refitd(self.command(self.port), self.environment())


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
