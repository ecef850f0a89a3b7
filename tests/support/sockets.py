"""Unix sockets whose paths are as long as pytest makes them: a socket's own path may have 107 bytes only."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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
