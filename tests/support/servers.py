"""Real server processes: the embedded engine, SGLang, and refitd itself.

Each has a process group of its own, which is gone at the end whatever happens, and a log. It counts as up when it says
so in its log, so nothing here sleeps or asks again and again.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from support.engine_template import ForkedEngine, template
from support.forked import Forked, ended
from support.sockets import free_port

SGLANG_VENV = os.environ.get("REFITD_SGLANG_VENV")
AREAL_VENV = os.environ.get("REFITD_AREAL_VENV")
VLLM_VENV = os.environ.get("REFITD_VLLM_VENV")
TRAINERS_VENV = os.environ.get("REFITD_TRAINERS_VENV")
API_KEY = "opens-reads"
ADMIN_KEY = "opens-changes"
KIT = Path(__file__).resolve().parents[1] / "sglang"
_TOO_LONG = (subprocess.TimeoutExpired, TimeoutError)
START_SECONDS = 500.0  # SGLang and vLLM are imported in 20 on two idle cores, and far more on busy ones
STOP_SECONDS = 15.0
TAIL = 30  # lines
Process = subprocess.Popen[bytes] | Forked | ForkedEngine


class ServerError(Exception):
    """A server does not come up, or will not stop. The text has the end of its log."""


class Server:
    """One process with its log. `command` gives its arguments for a port; 0 lets it choose, and it keeps that port."""

    name = "server"
    ready = re.compile(rb' ready on https?://127\.0\.0\.1:(\d+)(?:$|")')

    def __init__(self, folder: Path) -> None:
        self.log = folder / f"{self.name}.log"
        self.port = 0
        self._process: Process | None = None
        self._reader: threading.Thread | None = None
        self._up = threading.Event()

    def command(self, port: int) -> Sequence[str]:
        """Its command line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What its process finds in the environment."""
        return _environment()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> Process:
        if self._process is None:
            raise ServerError(f"{self.name} was not started")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it and wait until it is up."""
        self._up = threading.Event()
        self._process = self._begun()
        self._reader = threading.Thread(target=self._read, args=(self._process, self._up), daemon=True)
        self._reader.start()
        is_up = False
        try:
            is_up = self._up.wait(START_SECONDS) and self.is_running
        finally:  # the test's time may be over as well
            if not is_up:
                self.kill()
        if not is_up:
            raise ServerError(f"{self.name} does not come up; the end of {self.log}:\n{self.tail()}")
        return self

    def _begun(self) -> Process:
        return self._in_an_interpreter()

    def _in_an_interpreter(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self.command(self.port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            process_group=0,
        )

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait until nothing is left of it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left."""
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
            with suppress(*_TOO_LONG):
                self.process.wait(STOP_SECONDS)
        self.kill()

    def died(self) -> None:
        """Wait until it has ended by itself, then see to it that nothing is left."""
        try:
            self.process.wait(STOP_SECONDS)
        except _TOO_LONG:
            raise ServerError(f"{self.name} is still running; the end of {self.log}:\n{self.tail()}") from None
        self.kill()

    def restart(self) -> None:
        """A new process on the same port, whatever became of the old one."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)  # one that was forked a moment ago has no group yet
        group = _group(self._process.pid)
        for process in group:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self._process.wait(STOP_SECONDS)
        psutil.wait_procs([each for each in group if each.pid != self._process.pid], timeout=STOP_SECONDS)
        if self._reader is not None:
            self._reader.join(STOP_SECONDS)

    def _read(self, process: Process, up: threading.Event) -> None:
        assert process.stdout is not None
        if process.stdin is not None:
            process.stdin.close()
        with self.log.open("ab") as log, process.stdout as lines:
            for line in lines:
                log.write(line)
                log.flush()
                if found := self.ready.search(line.rstrip()):
                    self.port = int(found[1]) if found.groups() and found[1] else self.port
                    up.set()
        process.wait()  # its output ends a moment before it does
        up.set()  # it has ended: nothing is to be waited for


class EngineServer(Server):
    """An engine on a model. It wants keys, as one in production does."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        super().__init__(folder)
        self.model = model
        self._flags = [*flags, "--api-key", API_KEY, "--admin-api-key", ADMIN_KEY]

    @property
    def scheduler(self) -> psutil.Process:
        """The process that holds the weights."""
        return psutil.Process(self.pid)

    @contextmanager
    def frozen(self) -> Generator[None]:
        """Stop the process that holds the weights: what is sent to it meanwhile waits."""
        scheduler = self.scheduler
        scheduler.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                scheduler.resume()


class EmbeddedServer(EngineServer):
    """`python -m refitd_embedded`, in a process that need not import torch first."""

    name = "embedded"

    def _begun(self) -> Process:
        from refitd_embedded.__main__ import main  # here, because every test imports this module

        _, _, _, *words = self.command(self.port)
        return Forked(main, ["refitd_embedded", *words], self.environment())

    def command(self, port: int) -> Sequence[str]:
        model = ["--model-path", str(self.model)]
        return [sys.executable, "-m", "refitd_embedded", *model, *self._flags, "--port", str(port)]


class EmbeddedProgram(EmbeddedServer):
    """The same with an interpreter of its own, for tests of what reads the command lines of processes."""

    def _begun(self) -> Process:
        return self._in_an_interpreter()


class SglangServer(EngineServer):
    """A real SGLang on the CPU, in the environment that REFITD_SGLANG_VENV names.

    Its processes are forked from one that has imported SGLang, unless it is another SGLang than the one of that
    environment as it is, or one on a GPU.
    """

    name = "sglang"
    ready = re.compile(rb"The server is fired up and ready to roll")
    as_installed = "SGLANG_DEVICE" not in os.environ

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        super().__init__(folder, model, *flags)
        if SGLANG_VENV is None:
            raise ServerError("REFITD_SGLANG_VENV is not set: run `make sglang`")
        self.port = free_port()

    def command(self, port: int) -> Sequence[str]:
        venv = Path(SGLANG_VENV or "").absolute()
        return [str(KIT / "serve"), str(venv), str(self.model), str(port), *self._flags]

    def _begun(self) -> Process:
        if not self.as_installed:
            return self._in_an_interpreter()
        _, venv, *words = self.command(self.port)
        return ForkedEngine(template(Path(venv) / "bin/python", KIT / "template"), words, self.environment())

    def stop(self) -> None:
        """SIGKILL: it takes seconds to drain, and has nothing that is looked at afterwards."""
        self.kill()

    @property
    def scheduler(self) -> psutil.Process:
        """The process that holds the weights; the HTTP server is another."""
        for child in psutil.Process(self.pid).children(recursive=True):
            if "scheduler" in " ".join(child.cmdline()):
                return child
        raise ServerError(f"{self.name} has no scheduler; the end of {self.log}:\n{self.tail()}")


class RefitdServer(Server):
    """`refitd serve`.

    Args:
        by: words before its command line, such as `prlimit`: it then has an interpreter of its own.
        first: what its process does before it becomes refitd, such as to enter a namespace.
    """

    name = "refitd"

    def __init__(
        self,
        folder: Path,
        root: Path,
        engines: Sequence[str],
        *flags: str,
        by: Sequence[str] = (),
        first: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(folder)
        self._by = by
        self._first = first
        named = [word for url in engines for word in ("--engine", url)]
        self._arguments = ["--root", str(root), "--state", str(folder / "state"), *named, *flags]

    def _begun(self) -> Process:
        if self._by:
            return self._in_an_interpreter()
        return forked_refitd(self.command(self.port), self.environment(), self._first)

    def command(self, port: int) -> Sequence[str]:
        return [*self._by, sys.executable, "-m", "refitd", "serve", *self._arguments, "--port", str(port)]


class RefitdProgram(RefitdServer):
    """The same with an interpreter of its own, for tests of its memory and of its command line."""

    def _begun(self) -> Process:
        return self._in_an_interpreter()


def refitd_ended(*words: str) -> tuple[int, str]:
    """Run `refitd`, which is to end by itself, in a process of its own; its exit status, and all that it printed."""
    from refitd.__main__ import main  # here, because every test imports this module

    return ended(main, ["refitd", *words], _environment())


def forked_refitd(
    command: Sequence[str], environment: dict[str, str], first: Callable[[], object] | None = None
) -> Forked:
    """`python -m refitd …` in a process that need not import the service, and does `first` before."""
    from refitd.__main__ import main  # as above

    _, _, _, *words = command
    return Forked(main if first is None else partial(_after, first, main), ["refitd", *words], environment)


def _after(first: Callable[[], object], main: Callable[[], int | None]) -> int | None:
    first()
    return main()


def _environment() -> dict[str, str]:
    """Settings in the environment are for the user's own service. Two cores are shared by several servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _group(leader: int) -> list[psutil.Process]:
    """The processes of a group, its leader gone or not."""
    members: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader:
                members.append(process)
        except ProcessLookupError:
            pass
    return members
