"""Work that is shared out over threads, and stops as a whole: at the first error, or when its caller is interrupted.

numpy, xxhash and the kernel release the interpreter's lock while they copy, digest and sync, so threads do help.

Threads are kept for the next time: starting one takes up to 0.3 ms, and a publication uses sixteen. They are daemons,
and wait for work in between, so that they do not keep a process from ending. At its end the thread of a publication
that is under way is waited for (`publish/publication.py`), and so long its lanes go on. A pool of `concurrent.futures`
would accept no more work then.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread

MAX_LANES = 16
_IDLE_SECONDS = 0.05
_MOST_IDLE = 32
_IDLE_NAME = "refitd-idle"

Job = Callable[[Event], None]


def lanes_for(jobs: int) -> int:
    """How many threads are worth their while for so many jobs here."""
    return max(1, min(jobs, len(os.sched_getaffinity(0)), MAX_LANES))


def in_lanes(jobs: Sequence[Job], *, lanes: int, idle: Callable[[], None] | None = None) -> None:
    """Run jobs in threads. Nothing runs any more when this returns or raises.

    Args:
        jobs: each checks its event now and then, and ends early when it is set.
        lanes: the number of threads.
        idle: is called in this thread from time to time.

    Raises:
        BaseException: the first that a job raised.
    """
    running = Lanes(lanes if lanes > 1 and len(jobs) > 1 else 0)
    for job in jobs:
        running.add(job)
    running.join(idle)


class Lanes:
    """Threads that do jobs, in the order in which they are added, while their caller does something else.

    They end after `close`, or `join`, which also raises what went wrong.
    """

    def __init__(self, lanes: int) -> None:
        """Begin. Without any lane `join` does the jobs in its caller's thread."""
        self._stop = Event()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._turn = Lock()
        self._failure: BaseException | None = None
        self._ends: list[Event] = []
        try:
            for lane in range(lanes):
                self._ends.append(_run(self._lane, f"refitd-publish_{lane}"))
        except BaseException:
            self.stop()
            self._end()
            raise

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Add no more: the threads end when they have done what there is."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Have the jobs end early, and begin no others."""
        self._stop.set()

    def join(self, idle: Callable[[], None] | None = None) -> None:
        """Wait for all jobs. `idle`, and what this raises, are as for `in_lanes`."""
        self.close()
        try:
            if not self._ends:
                self._lane()
            for end in self._ends:
                while not end.wait(None if idle is None else _IDLE_SECONDS):
                    if idle is not None:
                        idle()
            if self._ends and idle is not None:
                idle()
        except BaseException:
            self.stop()
            raise
        finally:
            self._end()
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the error refers to this frame, which would keep it alive

    def _end(self) -> None:
        self.close()
        for end in self._ends:
            end.wait()

    def _lane(self) -> None:
        """Do jobs until there will be no more, or one failed."""
        while (job := self._jobs.get()) is not None and not self._stop.is_set():
            try:
                job(self._stop)
            except BaseException as error:  # raised by `join`
                with self._turn:
                    if not self._stop.is_set():
                        self._failure = error
                        self._stop.set()
        self._jobs.put(None)  # for the next lane


class _Worker(Thread):
    """One thread that is kept."""

    def __init__(self) -> None:
        super().__init__(name=_IDLE_NAME, daemon=True)
        self.inbox: SimpleQueue[tuple[Callable[[], None], str, Event] | None] = SimpleQueue()

    def run(self) -> None:
        while (task := self.inbox.get()) is not None:
            work, self.name, done = task
            try:
                work()
            finally:
                self.name = _IDLE_NAME
                del work, task  # an idle thread keeps nothing of them alive
                _idle.put(self)
                done.set()


class _Idle:
    """Workers that wait. Without a lock: a signal handler may interrupt `take`, and ask for a worker itself."""

    def __init__(self) -> None:
        self._workers: deque[_Worker] = deque()

    def put(self, worker: _Worker) -> None:
        """Take one back, or end it if there are enough."""
        if len(self._workers) < _MOST_IDLE:
            self._workers.append(worker)
        else:
            worker.inbox.put(None)

    def take(self) -> _Worker:
        """One that waits, or else a new one."""
        with suppress(IndexError):
            return self._workers.pop()
        worker = _Worker()
        worker.start()
        return worker

    def forget(self) -> None:
        """In a forked process there are no other threads."""
        self._workers.clear()


_idle = _Idle()
os.register_at_fork(after_in_child=_idle.forget)


def _run(work: Callable[[], None], name: str) -> Event:
    """Have `work`, which must not raise, done by a thread of this name. The event is set when it is done."""
    done = Event()
    _idle.take().inbox.put((work, name, done))
    return done
