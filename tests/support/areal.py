"""`refitd areal` as a process."""

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .forked import Forked
from .jobs import RUN, TOKEN, Job
from .servers import Server, forked_refitd


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
