"""Processes that send and receive (`GroupChild`), forked from one that has imported torch.

Each is a process with a session and an end of a socket of its own, and does what `transport.processes` does.
What an interpreter of its own adds is held by the tests of sharded publishers, of engines and of AReaL.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from unittest import mock

from refitd_client.transport import processes as program
from refitd_client.transport.child import GroupChild, serve
from support.forked import forking


class _ForkedMember:
    """As much of `subprocess.Popen` as `GroupChild` asks for."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("member", timeout)
        return status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def forked_members() -> Generator[None]:
    """Each `GroupChild` forks its process meanwhile."""
    with mock.patch.object(GroupChild, "_spawn", _spawn):
        yield


def _spawn(child: GroupChild) -> Connection:
    mine, its = socket.socketpair()
    with its:
        process = forking().Process(target=_be, args=(child._role, its, child._environment), daemon=True)
        process.start()
    child._process = _ForkedMember(process)  # pyright: ignore[reportAttributeAccessIssue]
    return child._connected(mine)


def _be(role: str, line: socket.socket, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    process = program._ROLES[role]()
    serve(Connection(line.detach()), process.work, process.end)
