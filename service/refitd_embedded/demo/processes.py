"""The demo's own stack: two engines and the service, as processes that are stopped again whatever happens.

Each child has a process group of its own, so that Ctrl-C reaches the demo alone and it decides who stops when; and a
log file in the work folder, which is quoted when a child dies.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

READY = re.compile(r" ready on (http://[^\s\"]+)")  # in a line of its own, or in a line of a log in JSON
START_SECONDS = 60.0
STOP_SECONDS = 15.0
LOOK_SECONDS = 0.05
TAIL = 15  # lines


class ProcessError(Exception):
    """A child does not start, or has died. The text has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where everything is: the service, the engines that it serves, and the folder that it watches."""

    service_url: str
    engines: tuple[str, ...]
    root: Path
    children: tuple["Child", ...] = ()

    def check(self) -> None:
        """Raise ProcessError if a child has died."""
        for child in self.children:
            child.check()


class Child:
    """One process with its log. Use it as a context manager: at the end it is gone."""

    def __init__(self, name: str, arguments: Sequence[str], logs: Path) -> None:
        self._name, self._arguments = name, [sys.executable, "-m", *arguments]
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Settings in the environment are for the user's own service, not for this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules, with our own interpreter
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _stop(self._process)

    def url(self) -> str:
        """Wait until its log says that it is ready, and return the URL there. Raises ProcessError."""
        ends = time.monotonic() + START_SECONDS
        while (found := READY.search(self._log.read_text(errors="replace"))) is None:
            self.check()
            if time.monotonic() > ends:
                raise ProcessError(f"{self._name} is not ready after {START_SECONDS:g} s.{self._tail()}")
            time.sleep(LOOK_SECONDS)
        return found[1]

    def check(self) -> None:
        """Raise ProcessError if it has died."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise ProcessError(f"{self._name} ended with status {status}.{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL:]
        return "".join(f"\n  {self._name}: {line}" for line in lines) or f" Its log {self._log} is empty."


@contextmanager
def own_stack(workdir: Path, model: Path) -> Generator[Stack]:
    """Start two engines on `model` and a service for them, and stop them at the end.

    Raises:
        ProcessError: one does not start.
    """
    root, logs = workdir / "root", workdir / "logs"
    root.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    with ExitStack() as running:
        engine = ["refitd_embedded", "--model-path", str(model), "--port", "0", "--max-running-requests", "256"]
        engines = [running.enter_context(Child(name, engine, logs)) for name in ("engine-a", "engine-b")]
        urls = tuple(child.url() for child in engines)
        flags = {"--root": root, "--state": workdir / "state", "--base-model": model, "--port": 0}
        words = ["refitd", "serve", *(word for name, value in flags.items() for word in (name, str(value)))]
        words += [word for url in urls for word in ("--engine", url)]
        service = running.enter_context(Child("refitd", words, logs))
        yield Stack(service_url=service.url(), engines=urls, root=root, children=(*engines, service))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it by SIGTERM, then by SIGKILL; the whole group, since a child may have children."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second Ctrl-C ends the waiting
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
