"""The demo's own stack: its engines and the service, as processes that are stopped again whatever happens.

Each child has a process group of its own, so that Ctrl-C reaches the demo alone and it decides who stops when; and a
log file in the work folder, which is quoted when a child dies. What is waited for before the first row is shown on
stderr, line by line: on a terminal the line moves, elsewhere it is printed when it is done.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from refitd_embedded.demo.table import is_live

READY = re.compile(r" ready on (http://[^\s\"]+)")  # in a line of its own, or in a line of a log in JSON
START_SECONDS = 180.0  # a busy machine takes a minute to import torch; a process that has ended is not waited for
STOP_SECONDS = 15.0
PROCESS_LOOK_SECONDS = 0.05
TAIL = 15  # lines
NAME_WIDTH = 13  # characters


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
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )

    def kill_and_restart(self) -> None:
        """End it by SIGKILL and start it again, as a supervisor does. It listens where it did; it is not waited for."""
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)
            self._process.wait()
        self._start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _stop(self._process)

    def url(self) -> str:
        """Wait until its log says that it is ready, and return the URL there. Raises ProcessError."""
        ends = time.monotonic() + START_SECONDS
        while (ready := READY.search(self._log.read_text(errors="replace"))) is None:
            self.check()
            if time.monotonic() > ends:
                raise ProcessError(f"{self.name} is not ready after {START_SECONDS:g} s.{self._tail()}")
            time.sleep(PROCESS_LOOK_SECONDS)
        url = ready[1]
        if "--port" in self._arguments:  # that is where it listens from now on: others know it by its address
            self._arguments[self._arguments.index("--port") + 1] = url.rpartition(":")[2].rstrip("/")
        return url

    def check(self) -> None:
        """Raise ProcessError if it has died."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise ProcessError(f"{self.name} ended with status {status}.{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL:]
        return "".join(f"\n  {self.name}: {line}" for line in lines) or f" Its log {self._log} is empty."


class SetUp(Protocol):
    """Shows what is waited for within a block, and at its end what `ready` was called with."""

    def __call__(self, name: str, /) -> AbstractContextManager[Callable[[str], None]]:
        """Begin to wait for `name`."""
        ...


@contextmanager
def unseen(_name: str, /) -> Generator[Callable[[str], None]]:
    """Show nothing."""
    yield lambda _: None


@contextmanager
def on_stderr(name: str, /) -> Generator[Callable[[str], None]]:
    """One line for the name, what became ready, and how long it took."""
    came = [""]
    began = time.monotonic()
    with _spinner(name) if is_live(sys.stderr.isatty()) else nullcontext():
        yield came.append
    took = time.monotonic() - began
    line = f"  {name:<{NAME_WIDTH}}{came[-1]}".rstrip()
    print(f"{line}  {took:.1f} s", file=sys.stderr, flush=True)


def _spinner(name: str) -> AbstractContextManager[object]:
    from rich.console import Console

    return Console(stderr=True).status(f"{name} …")


@contextmanager
def own_stack(workdir: Path, model: Path, *, progress: SetUp = unseen) -> Generator[Stack]:
    """Start engines on `model` and a service for them, and stop them at the end.

    Raises:
        ProcessError: one does not start.
    """
    root, logs = workdir / "root", workdir / "logs"
    root.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    with ExitStack() as running:
        words = ["refitd_embedded", "--model-path", str(model), "--port", "0", "--max-running-requests", "256"]
        engines = [running.enter_context(Child(name, words, logs)) for name in ("engine-a", "engine-b")]
        urls = list[str]()
        for child in engines:
            with progress(child.name) as ready:
                urls.append(child.url())
                ready(urls[-1])
        # Their names, by which table, commands and dashboard speak of the same engine.
        named = {"engines": [{"id": child.name, "url": url} for child, url in zip(engines, urls, strict=True)]}
        (workdir / "engines.json").write_text(json.dumps(named))
        flags = {"--root": root, "--state": workdir / "state", "--base-model": model, "--port": 0}
        flags["--engines-file"] = workdir / "engines.json"
        words = ["refitd", "serve", *(word for name, value in flags.items() for word in (name, str(value)))]
        service = running.enter_context(Child("refitd", words, logs))
        with progress("service") as ready:
            service_url = service.url()
            ready(f"{service_url} (the dashboard, too, until the demo ends)")
        yield Stack(service_url=service_url, engines=tuple(urls), root=root, children=(*engines, service))


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
