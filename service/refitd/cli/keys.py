"""Single keys of a terminal, for a command that is left by one. Where stdin is no terminal no key is ever pressed."""

import os
import select
import sys
import termios
import time
import tty
from typing import Any, Self


class Keys:
    """Reads keys without waiting for Enter, for the length of the block. Ctrl-C interrupts as ever."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, key: str, *, within: float) -> bool:
        """Wait for a key, at most `within` seconds; whether it was pressed. Other keys are read and forgotten."""
        ends = time.monotonic() + within
        while (left := ends - time.monotonic()) > 0:
            if self._fd is None:
                time.sleep(left)
            elif select.select([self._fd], [], [], left)[0]:
                read = os.read(self._fd, 1024)
                if not read:  # the terminal is gone
                    self._fd = None
                elif key in read.decode(errors="replace"):
                    return True
        return False
