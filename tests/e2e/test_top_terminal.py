"""`refitd top` in a real terminal: it is drawn, follows its size, and ends quietly."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.stand_in_service import make_engine, make_run, stand_in

pytestmark = [pytest.mark.e2e]


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


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_it_is_live_follows_the_size_of_its_window_and_ends_with_ctrl_c(environment: dict[str, str]) -> None:
    with stand_in() as service:
        service.runs, service.engines = [make_run()], [make_engine("gpu-0")]
        words = ["-m", "refitd", "top", "--interval", "0.1", "--url", service.url]
        with terminal(sys.executable, *words, **environment) as shown:
            colours = re.search(r"\x1b\[[0-9;]*3[0-9]", shown.until("All 2 engines serve step 2"))
            assert (colours is None) is bool(environment)
            service.runs = [make_run(headline="Something else.")]
            shown.until("Something else")
            shown.resize(10, 40)
            shown.until("Something else")
            service.runs = []
            shown.until("gpu-0")
            shown.child.send_signal(signal.SIGINT)
            assert shown.child.wait(10) == 0
            assert "Traceback" not in shown.until(r"\x1b\[\?1049l")  # back to what was there before
