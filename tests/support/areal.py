"""`refitd areal` as a process, and the released AReaL in an environment of its own."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .forked import Forked
from .jobs import RUN, TOKEN, Job
from .servers import AREAL_VENV, Server, forked_refitd

TRAIN = Path(__file__).resolve().parents[2] / "examples/areal/train.py"


class ArealServer(Server):
    """`refitd areal`."""

    name = "areal"
    ready = re.compile(rb"refitd areal: (?:.* ready on http://127\.0\.0\.1:(\d+)|ready)$")

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
        if "--weights" not in flags:
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
    python = Path(AREAL_VENV or "").absolute() / "bin/python"
    places = [str(tmp_path / "name_resolve"), str(tmp_path / "fileroot")]
    command = [str(python), "-W", "ignore", str(TRAIN), how, *places, *map(str, models)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["AREAL_LLM_SERVER_ADDRS"] = url.removeprefix("http://")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept, cwd=tmp_path)
    found = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0])
