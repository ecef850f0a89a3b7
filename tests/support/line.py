"""A line to a server on loopback, by a process of its own: while that is stopped, what is sent does not arrive.

Connections stay, as in a network that loses everything: nobody is told that the other side is away.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """The line's own `port`, and its process."""

    port: int
    process: "subprocess.Popen[bytes]"

    def cut(self) -> None:
        """Let nothing through any more, in either direction."""
        self.process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Let everything through, also what was sent meanwhile."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def line(port: int) -> Generator[Line]:
    """A line to a port."""
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests)}
    words = [sys.executable, "-m", "support.line", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            yield Line(int(process.stdout.readline()), process)
        finally:
            process.kill()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            here, _ = server.accept()
            there = socket.create_connection(("127.0.0.1", port))
            for ends in ((here, there), (there, here)):
                threading.Thread(target=_pass_on, args=ends, daemon=True).start()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
