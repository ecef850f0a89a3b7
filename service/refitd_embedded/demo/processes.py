"""The demo's own stack: its engines and the service, as processes that are stopped again whatever happens.

Each child has a process group of its own, so that Ctrl-C reaches the demo alone and it decides who stops when; and a
log file in the work folder, which is quoted when a child dies.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

READY = re.compile(r" ready on (http://[^\s\"]+)")  # in a line of its own, or in a line of a log in JSON
START_SECONDS = 180.0  # a busy machine takes a minute to import torch; a process that has ended is not waited for
STOP_SECONDS = 15.0
PROCESS_LOOK_SECONDS = 0.05
TAIL = 15  # lines


class ProcessError(Exception):
    """A child does not start, or has died. The text has the end of its log."""


class Child:
    """One process with its log. Use it as a context manager: at the end it is gone.

    `arguments` are those of this interpreter's `-m`.
    """

    def __init__(self, name: str, arguments: Sequence[str], logs: Path) -> None:
        self.name, self._arguments = name, [sys.executable, "-m", *arguments]
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        # Settings in the environment are for the user's own service, not for this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    def kill_and_restart(self) -> None:
        """End it by SIGKILL and start it again where it listened, as a supervisor does. Does not wait for it."""
        self._end(signal.SIGKILL)
        self._start()

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(subprocess.TimeoutExpired):
                self._end(signal.SIGTERM)
        finally:  # also when a second Ctrl-C ends the waiting
            self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, since a child may have children; wait for STOP_SECONDS."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)
            self._process.wait(STOP_SECONDS)

    def url(self) -> str:
        """Wait until its log says that it is ready, and return the URL there. Raises ProcessError."""
        ends = time.monotonic() + START_SECONDS
        while (ready := READY.search(self._log.read_text(errors="replace"))) is None:
            self.check()
            if time.monotonic() > ends:
                raise ProcessError(f"{self.name} is not ready after {START_SECONDS:g} s.{self._tail()}")
            time.sleep(PROCESS_LOOK_SECONDS)
        if "--port" in self._arguments:  # from now on it listens there: others know it by its address
            self._arguments[self._arguments.index("--port") + 1] = ready[1].rpartition(":")[2].rstrip("/")
        return ready[1]

    def check(self) -> None:
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise ProcessError(f"{self.name} ended with status {status}.{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL:]
        return "".join(f"\n  {self.name}: {line}" for line in lines) or f" Its log {self._log} is empty."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where everything is: the service, its engines, and the folder that it watches. `children` are the demo's own."""

    service_url: str
    engines: tuple[str, ...]
    root: Path
    children: tuple[Child, ...] = ()

    def check(self) -> None:
        for child in self.children:
            child.check()


@contextmanager
def own_stack(workdir: Path, model: Path) -> Generator[Stack]:
    """Start engines on `model` and a service for them, say on stderr what is ready, and stop them at the end.

    Raises:
        ProcessError: one does not start.
    """
    root, logs = workdir / "root", workdir / "logs"
    root.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    with ExitStack() as running:
        words = ["refitd_embedded", "--model-path", str(model), "--port", "0", "--max-running-requests", "256"]
        engines = [running.enter_context(Child(name, words, logs)) for name in ("engine-a", "engine-b")]
        urls = tuple(_ready_url(child) for child in engines)
        # Their names, by which table, commands and dashboard speak of the same engine.
        named = {"engines": [{"id": child.name, "url": url} for child, url in zip(engines, urls, strict=True)]}
        (workdir / "engines.json").write_text(json.dumps(named))
        words = ["refitd", "serve", "--root", str(root), "--state", str(workdir / "state"), "--port", "0"]
        words += ["--base-model", str(model), "--engines-file", str(workdir / "engines.json")]
        service = running.enter_context(Child("refitd", words, logs))
        url = _ready_url(service)
        yield Stack(service_url=url, engines=urls, root=root, children=(*engines, service))


def _ready_url(child: Child) -> str:
    began, url = time.monotonic(), child.url()
    note = " (the dashboard, too, until the demo ends)" if child.name == "refitd" else ""
    print(f"  {child.name:<10}{url}{note}  {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return url
