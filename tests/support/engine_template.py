"""Servers that are forked from a process which has imported their engine: tests/sglang/template, tests/vllm/template.

What runs in that process is `support.templates`.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


class ForkedEngine:
    """As much of `subprocess.Popen` as tests ask for."""

    stdin = None

    def __init__(self, orders: socket.socket, words: Sequence[str], environment: dict[str, str]) -> None:
        self._told, tells = Pipe(duplex=False)
        reads, writes = os.pipe()
        order = json.dumps({"words": [*words], "environment": environment})
        with tells:
            socket.send_fds(orders, [order.encode()], [writes, tells.fileno()])
        os.close(writes)
        self.stdout = os.fdopen(reads, "rb")
        self._asking = threading.Lock()
        self._status: int | None = None
        self.pid: int = self._told.recv()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with self._asking:
            if self._status is None and self._told.poll():
                self._status = self._told.recv()
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status when it has ended. Raises TimeoutError."""
        wait([self._told], timeout)
        if (status := self.poll()) is None:
            raise TimeoutError
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it one, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def template(python: Path, script: Path) -> socket.socket:
    """Where the one template of an interpreter takes its orders, as soon as it has imported the engine."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    with theirs:
        process = subprocess.Popen([python, script], stdin=theirs.fileno(), env=environment, process_group=0)
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours
