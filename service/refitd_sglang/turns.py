"""Turns of the interpreter for a thread beside SGLang's loop.

That loop never waits, not even when there is nothing to do, so it gives the interpreter's lock away only when it is
asked to: after `sys.getswitchinterval()`, 5 ms. A thread that reads and digests 3 GB lets go of the lock some ten
thousand times, and would be at it for minutes. So while it works, turns are shorter.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_SECONDS = 0.00002
_turn = threading.Lock()
_before: list[float] = []


@contextmanager
def short_turns() -> Iterator[None]:
    """While the context lasts, in any thread, a thread that wants the lock gets it soon."""
    with _turn:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_SHORT_SECONDS, _before[0]))
    try:
        yield
    finally:
        with _turn:
            last = _before.pop()
            if not _before:
                sys.setswitchinterval(last)
