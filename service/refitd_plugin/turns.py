"""How the plugin's threads run beside the engine's loop: short turns of the interpreter, and one thread for deadlines.

SGLang's loop never waits, not even when there is nothing to do, so a thread that reads and digests 3 GB, and releases
the interpreter's lock some ten thousand times, would take minutes. It gets the lock back in one of two ways:

- It asks for it. A thread does so when it has waited `sys.getswitchinterval()`, 5 ms, in which no thread took a turn.
- It is faster than the loop, which releases the lock by itself at each system call, to take it again a microsecond
  later. A waiting thread is woken then, comes too late, and begins its wait anew (`take_gil` in CPython's ceval_gil.c):
  a loop that looks at its sockets every 0.1 ms is never asked.

So while a thread works here, its wait is shorter than what is between two of the loop's looks. Linux adds 50 µs to
each wait, unless the thread says that it wants none of that slack (PR_SET_TIMERSLACK, prctl(2)). The thread that a
request wakes has no turn yet in which it could shorten its wait: for it the interval stays short as long as the channel
listens. That changes nothing while no other thread waits.

A timer would be a thread for each time that something is prepared. To begin one beside SGLang's loop takes longer than
to prepare a version whose files lie where the last one's did: one thread looks at all deadlines.
"""

import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

logger = logging.getLogger("refitd_plugin")
_TURN_LOOK_SECONDS = 1.0
_SHORT_SECONDS = 0.000005
_LISTENING_SECONDS = 0.00002  # shorter than what lies between two looks of the loop
_SET_SLACK, _GET_SLACK = 29, 30  # prctl(2), of the calling thread, in nanoseconds
_NO_SLACK = 1
_turn = threading.Lock()
_usual: list[float] = []  # the interval outside all contexts, while there are any
_wanted: list[float] = []
_prctl = getattr(ctypes.PyDLL(None), "prctl", None)  # not CDLL: its calls release the lock


def short_turns() -> AbstractContextManager[None]:
    """While the context lasts, a thread that waits for the lock gets it soon, and this one at once. For any thread."""
    return _turns_of(_SHORT_SECONDS)


def listening_turns() -> AbstractContextManager[None]:
    """While the context lasts, this thread gets the lock soon after a system call in which it has waited for long."""
    return _turns_of(_LISTENING_SECONDS)


@contextmanager
def _turns_of(seconds: float) -> Iterator[None]:
    with _turn:
        if not _usual:
            _usual.append(sys.getswitchinterval())
        _wanted.append(seconds)
        _set_interval()
    try:
        with _no_slack():
            yield
    finally:
        with _turn:
            _wanted.remove(seconds)
            _set_interval()


def _set_interval() -> None:
    sys.setswitchinterval(min(_usual + _wanted))
    if not _wanted:
        _usual.clear()


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


@dataclass(slots=True, eq=False)
class _Work:
    """What is being prepared, in which thread, and since when (monotonic, in seconds)."""

    path: str
    stop: threading.Event
    thread: int
    began: float
    is_logged: bool = False


class Deadline:
    """Sets an event after `stop_seconds`; after `slow_seconds` logs where the thread is."""

    def __init__(self, stop_seconds: float, slow_seconds: float) -> None:
        self._stop_seconds, self._slow_seconds = stop_seconds, slow_seconds
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, path: str, stop: threading.Event) -> Generator[None]:
        """The time of the preparation of `path`, which is one at a time."""
        self._work = _Work(path, stop, threading.get_ident(), time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="refitd-deadline", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._work = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(_TURN_LOOK_SECONDS, self._slow_seconds, self._stop_seconds))
            if (work := self._work) is not None:
                self._look(work, time.monotonic() - work.began)

    def _look(self, work: _Work, seconds: float) -> None:
        if seconds >= self._stop_seconds:
            work.stop.set()
        if seconds >= self._slow_seconds and not work.is_logged:
            work.is_logged = True
            frame = sys._current_frames().get(work.thread)  # noqa: SLF001 - Python has no other name for it
            where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere"
            logger.warning(
                "refitd has been preparing %s for %g s, and is at:\n%s", work.path, self._slow_seconds, where
            )
