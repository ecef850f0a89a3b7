"""Deadlines of a rank's thread that prepares: one thread that looks now and then, for all of them.

A timer would be a thread for each time that something is prepared. To begin one beside SGLang's loop takes longer than
to prepare what lies where it did.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("refitd_plugin")

_LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Work:
    """What is being prepared, in which thread, and since when."""

    path: str
    stop: threading.Event
    thread: int
    began: float
    is_told: bool = False


class Deadline:
    """Sets an event after `stop_seconds`; after `slow_seconds` tells the log where the thread is."""

    def __init__(self, stop_seconds: float, slow_seconds: float) -> None:
        """No thread yet."""
        self._stop_seconds, self._slow_seconds = stop_seconds, slow_seconds
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, path: str, stop: threading.Event) -> Generator[None]:
        """While this context lasts. One at a time."""
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
            time.sleep(min(_LOOK_SECONDS, self._slow_seconds, self._stop_seconds))
            if (work := self._work) is not None:
                self._look(work, time.monotonic() - work.began)

    def _look(self, work: _Work, seconds: float) -> None:
        if seconds >= self._stop_seconds:
            work.stop.set()
        if seconds >= self._slow_seconds and not work.is_told:
            work.is_told = True
            _tell_where(work, self._slow_seconds)


def _tell_where(work: _Work, seconds: float) -> None:
    """Into the log: a version that takes so long to prepare may wait for something."""
    frame = sys._current_frames().get(work.thread)  # noqa: SLF001 - Python has no other name for it
    where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere"
    logger.warning("refitd has been preparing %s for %g s, and is at:\n%s", work.path, seconds, where)
