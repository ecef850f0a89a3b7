"""How soon a thread gets the interpreter beside a loop that looks at its sockets and never waits, as SGLang's does.

    python tests/bench/turns.py

The loop looks at two sockets and runs Python in between, for about 30 or 100 us. The thread makes 100 system calls, or
runs 1.5 ms of Python, twelve times; what is printed is the middle, in milliseconds. The settings are the interpreter's
switch interval, and the timer slack of the thread; `refitd_plugin/channel.py` says why both matter and what the plugin
sets.
"""

import ctypes
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SETTINGS = [(interval, slack) for interval in (0.005, 0.00002, 0.000005) for slack in (50_000, 1)]
LOOPS = {"30 us": 1000, "100 us": 3000}
_SET_SLACK = 29  # prctl(2), in nanoseconds


def python(count: int) -> int:
    """Run Python for a while."""
    total = 0
    for number in range(count):
        total += number
    return total


def system_calls() -> None:
    """Each of them gives the lock away."""
    for _ in range(100):
        os.access("/", os.F_OK)


WORK: dict[str, Callable[[], object]] = {"100 system calls": system_calls, "Python": lambda: python(60_000)}


def beside(work: Callable[[], object], interval: float, slack: int, took: list[float]) -> None:
    """In a thread of its own: the slack is the thread's."""
    ctypes.PyDLL(None).prctl(_SET_SLACK, ctypes.c_ulong(slack))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    for _ in range(12):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    sys.setswitchinterval(usual)


def measured(work: Callable[[], object], between: int, interval: float, slack: int) -> float:
    """Milliseconds, the middle."""
    took: list[float] = []
    thread = threading.Thread(target=beside, args=(work, interval, slack, took))
    mine, its = socket.socketpair()
    with mine, its:
        mine.setblocking(False)
        thread.start()
        while thread.is_alive():
            for _ in range(2):
                with suppress(BlockingIOError):
                    mine.recv(1)
            python(between)
    return statistics.median(took)


def main() -> None:
    """All settings, one after the other."""
    for name, work in WORK.items():
        for loop, between in LOOPS.items():
            for interval, slack in SETTINGS:
                found = measured(work, between, interval, slack)
                print(f"{name}, a loop of {loop}, interval {interval * 1e6:g} us, slack {slack} ns: {found:.2f} ms")


if __name__ == "__main__":
    main()
