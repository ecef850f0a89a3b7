"""Turns of the interpreter for a thread beside SGLang's loop.

That loop never waits, not even when there is nothing to do, so a thread that reads and digests 3 GB, and lets go of the
interpreter's lock some ten thousand times, would be at it for minutes. It gets the lock back in one of two ways:

- It asks for it. A thread does so when it has waited `sys.getswitchinterval()`, 5 ms, in which nobody took a turn.
- It is faster than the loop, which lets go by itself at each system call, to take the lock again a microsecond later.
  Whoever waits is woken then, comes too late, and begins its wait anew (`take_gil` in CPython's ceval_gil.c): a loop
  that looks at its sockets every 0.1 ms is never asked.

So while a thread works here, its wait is shorter than what is between two of the loop's looks. Linux adds 50 µs to
each wait, unless the thread says that it wants none of that slack (PR_SET_TIMERSLACK, prctl(2)).
"""

import ctypes
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

_SHORT_SECONDS = 0.000005
_SET_SLACK, _GET_SLACK = 29, 30  # prctl(2), of the calling thread, in nanoseconds
_NO_SLACK = 1
_turn = threading.Lock()
_before: list[float] = []
_prctl = getattr(ctypes.PyDLL(None), "prctl", None)  # not CDLL: a call of that gives the lock away


@contextmanager
def short_turns() -> Iterator[None]:
    """While the context lasts, in any thread, a thread that wants the lock gets it soon; this one at once."""
    with _turn:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_SHORT_SECONDS, _before[0]))
    try:
        with _no_slack():
            yield
    finally:
        with _turn:
            last = _before.pop()
            if not _before:
                sys.setswitchinterval(last)


@contextmanager
def _no_slack() -> Generator[None]:
    if _prctl is None:
        yield
        return
    usual = _prctl(_GET_SLACK)
    _prctl(_SET_SLACK, ctypes.c_ulong(_NO_SLACK))
    try:
        yield
    finally:
        _prctl(_SET_SLACK, ctypes.c_ulong(usual))
