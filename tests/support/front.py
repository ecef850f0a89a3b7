"""`refitd front` as a process."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .jobs import RUN, TOKEN, Job
from .servers import VLLM_VENV, Process, Server, forked_refitd

NCCL_STAND_IN = Path(__file__).with_name("nccl_stand_in")


class FrontServer(Server):
    """`refitd front` of a job's run, with the job's tokens and keys. Checkpoints lie in `fileroot`."""

    name = "front"
    ready = re.compile(rb"refitd front: .* ready on http://127\.0\.0\.1:(\d+)$")

    def __init__(self, folder: Path, job: Job, *flags: str, has_keys: bool = True) -> None:
        super().__init__(folder)
        keys = folder / "keys"
        self._flags = ["--root", str(job.root), "--run", RUN, "--service", job.refitd.url, *flags]
        for flag in ("token-file", *(("engine-key-file", "engine-admin-key-file") if has_keys else ())):
            self._flags += [f"--{flag}", str(keys / f"--{flag}")]
        self._flags += ["--checkpoints", str(folder / "fileroot")]
        assert (keys / "--token-file").read_text() == TOKEN

    def address_of(self, engine: str) -> str:
        """Where an engine's own address is: known when it listens."""
        line = re.compile(rf"refitd front: {re.escape(engine)} ready on (\S+)")
        for _ in range(600):
            if (found := line.search(self.log.read_text(errors="replace"))) is not None:
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"no address of {engine}; the end of its log:\n{self.tail()}")

    def command(self, port: int) -> Sequence[str]:
        listen = [] if "--engine" in self._flags else ["--listen", f"127.0.0.1:{port}"]
        return [sys.executable, "-m", "refitd", "front", *self._flags, *listen]

    def _begun(self) -> Process:
        return forked_refitd(self.command(self.port), self.environment())


class GroupFront(FrontServer):
    """Its members find vLLM, what stands in for NCCL there, and more GPUs than they need."""

    def environment(self) -> dict[str, str]:
        (site,) = (Path(VLLM_VENV or "").absolute() / "lib").glob("python3*/site-packages")
        path = os.pathsep.join([str(NCCL_STAND_IN), *filter(None, sys.path), str(site)])
        return super().environment() | {"PYTHONPATH": path, "REFITD_TEST_GPUS": "8"}

    def _begun(self) -> Process:
        return self._in_an_interpreter()
