"""`refitd areal` as a process."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .jobs import RUN, TOKEN, Job
from .servers import Server


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
        assert (keys / "--token-file").read_text() == TOKEN

    def command(self, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "refitd", "areal", *self._flags]
