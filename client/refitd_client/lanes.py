"""Work that is shared out over threads, and stops as a whole: at the first error, or when its caller is interrupted.

numpy, xxhash and the kernel release the interpreter's lock while they copy, digest and sync, so threads do help.

Each use starts its threads. `Thread.start` would wait until the new thread runs, and so for the interpreter's lock,
sixteen times. At the end of a process the thread of a publication that is under way is waited for
(`publish/publication.py`), and so long its lanes go on. A pool of `concurrent.futures` would accept no more work then.
"""

import os
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Lock

MAX_LANES = 16
_IDLE_SECONDS = 0.05

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
            for _ in range(lanes):
                end = Event()
                start_new_thread(self._work, (end,))
                self._ends.append(end)
        except BaseException:
            self.stop()
            self._end()
            raise

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
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

    def _work(self, end: Event) -> None:
        try:
            self._lane()
        finally:
            end.set()

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
