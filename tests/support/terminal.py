"""A command in a pseudo-terminal, as a person has it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """A process in a pseudo-terminal, and what it has written."""

    def __init__(self, child: "subprocess.Popen[bytes]", screen: int) -> None:
        self.child = child
        self._screen = screen
        self._written = ""

    def until(self, pattern: str, within: float = 30.0) -> str:
        """Read until it has written something since the last time; return all that it has written since."""
        ends = time.monotonic() + within
        while not re.search(pattern, self._written):
            if not select.select([self._screen], [], [], max(ends - time.monotonic(), 0))[0]:
                raise AssertionError(f"no {pattern!r} in {self._written!r}")
            self._written += os.read(self._screen, 65536).decode(errors="replace")
        written, self._written = self._written, ""
        return written

    def resize(self, lines: int, columns: int) -> None:
        """As a window that is drawn larger or smaller."""
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal(*command: str, **environment: str) -> Iterator[Terminal]:
    """Run a command in a terminal of 24 lines of 80 columns."""
    screen, inside = pty.openpty()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TERM": "xterm-256color"}
    child = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=env | environment)
    os.close(inside)
    shown = Terminal(child, screen)
    shown.resize(24, 80)
    try:
        yield shown
    finally:
        child.kill()
        child.wait()
        os.close(screen)
