"""Threads that are kept for the next time: to start one takes up to 0.3 ms, and a publication wants sixteen.

They are daemons, and wait for work in between, so that they keep no process from its end. A publication that is under
way then is waited for by the thread that it goes on in (`background.py`), and its lanes go on as long. A pool of
`concurrent.futures` would take nothing any more.
"""

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread

_MOST_IDLE = 32
_IDLE_NAME = "refitd-idle"

Work = Callable[[], None]


class _Worker(Thread):
    """One thread."""

    def __init__(self) -> None:
        super().__init__(name=_IDLE_NAME, daemon=True)
        self.inbox: SimpleQueue[tuple[Work, str, Event] | None] = SimpleQueue()

    def run(self) -> None:
        """Do one work after the other."""
        while (task := self.inbox.get()) is not None:
            work, self.name, done = task
            try:
                work()
            finally:
                self.name = _IDLE_NAME
                del work, task  # nothing of it is kept while there is nothing to do
                _idle.put(self)
                done.set()


class _Idle:
    """Workers that wait."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._workers: list[_Worker] = []

    def put(self, worker: _Worker) -> None:
        """Take one back, or have it end where there are enough."""
        with self._turn:
            if len(self._workers) < _MOST_IDLE:
                self._workers.append(worker)
            else:
                worker.inbox.put(None)

    def take(self) -> _Worker:
        """One that waits, or else a new one."""
        with self._turn:
            if self._workers:
                return self._workers.pop()
        worker = _Worker()
        worker.start()
        return worker

    def forget(self) -> None:
        """In a forked process there are no other threads."""
        self._turn = Lock()
        self._workers = []


_idle = _Idle()
os.register_at_fork(after_in_child=_idle.forget)


def run(work: Work, *, name: str) -> Event:
    """Have `work`, which must not raise, done by a thread. The event is set when it is."""
    done = Event()
    _idle.take().inbox.put((work, name, done))
    return done
