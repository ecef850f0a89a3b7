"""A Python program in a process that is forked from one that has imported what it needs: torch alone takes seconds."""

import multiprocessing
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import BinaryIO
from unittest import mock

_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "fastapi", "uvicorn", "safetensors.torch"]
_PRELOAD += ["torch._dynamo"]  # imported by what shards a model first, in two seconds
_PRELOAD += ["refitd_client", "refitd_embedded.engine", "refitd_embedded.server", "refitd.app", "refitd.cli.app"]
_PRELOAD += ["refitd.cli.serve", "support.prepared"]


@cache
def forking() -> ForkServerContext:
    """The one context of this process; what is forked need not wait for the imports, however long they take."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):  # where it finds `support`
        first = context.Process(target=_nothing)
        first.start()
    first.join()
    return context


def fork_server() -> str:
    """The address of the process that is forked."""
    forking()
    return forkserver._forkserver._forkserver_address  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


@contextmanager
def forking_at(address: str) -> Generator[None]:
    """In a process that was forked itself: it has others forked where it came from, and begins no server of its own."""
    server = forkserver._forkserver  # pyright: ignore[reportPrivateUsage]
    with mock.patch.object(server, "ensure_running"), mock.patch.object(server, "_forkserver_address", address):
        yield


def _nothing() -> None:
    pass


class ForkedProcess(ABC):
    """As much of `subprocess.Popen` as tests ask for, but for what it reads and prints. `ends` is ready at its end."""

    pid: int
    ends: Connection | int

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status when it has ended. Raises TimeoutError."""
        wait([self.ends], timeout)
        if (status := self.poll()) is None:
            raise TimeoutError
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it one, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forked(ForkedProcess):
    """A program of this project. What it prints, warnings too, comes by `stdout`."""

    def __init__(self, main: Callable[[], int | None], words: Sequence[str], environment: dict[str, str]) -> None:
        context = forking()
        reader, writer = context.Pipe(duplex=False)
        hears, tells = context.Pipe(duplex=False)
        self._process: ForkServerProcess = context.Process(
            target=_be, args=(main, list(words), environment, hears, writer), daemon=True
        )
        self._asking = threading.Lock()
        self._process.start()
        writer.close()
        hears.close()
        self.stdin: BinaryIO = os.fdopen(os.dup(tells.fileno()), "wb", buffering=0)
        tells.close()
        self.stdout: BinaryIO = os.fdopen(os.dup(reader.fileno()), "rb")
        reader.close()
        assert self._process.pid is not None
        self.pid, self.ends = self._process.pid, self._process.sentinel

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with self._asking:  # it is read once, from a pipe, which is empty for a moment afterwards
            return self._process.exitcode


def ended(main: Callable[[], int | None], words: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run it to its end; its exit status, and all that it printed."""
    forked = Forked(main, words, environment)
    with forked.stdin, forked.stdout as out:
        said = out.read().decode()
    return forked.wait(), said


def _be(
    main: Callable[[], int | None], words: list[str], environment: dict[str, str], hears: Connection, out: Connection
) -> None:
    os.setpgid(0, 0)
    os.dup2(hears.fileno(), 0)
    hears.close()
    sys.stdin = os.fdopen(0, closefd=False)
    for fd in (1, 2):
        os.dup2(out.fileno(), fd)
    out.close()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.exit(main())
