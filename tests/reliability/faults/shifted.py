"""`python shifted.py FILE PYTHON -m MODULE ARGUMENTS…`: run a module with a wall clock that is wrong.

FILE holds by how many seconds, and is read at each look at the clock, so that the clock can be set while it runs. The
monotonic clock is right, as it is when an administrator or NTP sets the other one.
"""

import datetime as dt
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_true = time.time
_true_ns = time.time_ns
_FILE = Path(sys.argv[1] if __name__ == "__main__" else "/dev/null")


def shift() -> float:
    """By how much the clock is wrong now."""
    return float(_FILE.read_text())


class Shifted(dt.datetime):
    """The class `datetime` as everyone sees it."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> "Shifted":
        """The wrong time."""
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> "Shifted":
        """The wrong time."""
        return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)


def main() -> None:
    """Set the clock wrong, and become the module."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (time, "time", lambda: _true() + shift()),
        (time, "time_ns", lambda: _true_ns() + int(shift() * 10**9)),
        (dt, "datetime", Shifted),
    ]
    for module, name, wrong in replaced:
        setattr(module, name, wrong)
    module, sys.argv = sys.argv[4], sys.argv[4:]
    sys.path.pop(0)  # the folder of this script, in which nothing is meant to be imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
