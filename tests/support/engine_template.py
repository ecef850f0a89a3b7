"""Servers that are forked from a process which has imported their engine: tests/sglang/template, tests/vllm/template.

What runs in that process is `support.templates`. Scripts that train are forked in the same way: `support.scripts`.
"""

import atexit
import json
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing import Pipe
from pathlib import Path

from support.forked import ForkedProcess

TESTS = Path(__file__).resolve().parents[1]


class ForkedEngine(ForkedProcess):
    """An engine's server."""

    stdin = None

    def __init__(self, orders: socket.socket, words: Sequence[str], environment: dict[str, str]) -> None:
        self._told, tells = Pipe(duplex=False)
        self.ends = self._told
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
