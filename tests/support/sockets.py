"""Free ports, and Unix sockets whose paths are as long as pytest makes them: a socket's own path may have 107 bytes
only."""

import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port of TCP that is free just now, for a process that cannot choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def short(path: Path) -> Generator[str]:
    """Another path of the same file, by way of its folder's descriptor."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def reach(line: socket.socket, path: Path) -> None:
    """Connect."""
    with short(path) as name:
        line.connect(name)


def listens(path: Path) -> bool:
    """Whether somebody does there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            reach(probe, path)
        except OSError:
            return False
        return True


def ask(socket_path: Path, /, **request: Any) -> dict[str, Any]:
    """One request and its reply over a channel."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        reach(line, socket_path)
        line.sendall(json.dumps(request).encode() + b"\n")
        with line.makefile("rb") as reply:
            return json.loads(reply.readline())
