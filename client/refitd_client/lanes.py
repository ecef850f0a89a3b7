"""Work that is shared out over threads, and stops as a whole: at the first error, or when its caller is interrupted.

numpy, xxhash and the kernel let go of the interpreter's lock while they copy, digest and sync, so threads do help.
"""

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Lock

from refitd_client import workers

MAX_LANES = 16
_TELL_SECONDS = 0.05

Job = Callable[[Event], None]


def lanes_for(jobs: int) -> int:
    """How many threads so many jobs are worth here."""
    return max(1, min(jobs, len(os.sched_getaffinity(0)), MAX_LANES))


def in_lanes(jobs: Sequence[Job], *, lanes: int, idle: Callable[[], None] | None = None) -> None:
    """Run jobs, each of which looks at its event now and then and ends early when it is set.

    `idle` is called in this thread from time to time. Nothing runs any more when this returns or raises.

    Raises:
        BaseException: the first that a job raised.
    """
    running = Lanes(lanes if lanes > 1 and len(jobs) > 1 else 0)
    for job in jobs:
        running.add(job)
    running.join(idle)


class Lanes:
    """Threads that do jobs, in the order in which they are added, while their caller does something else.

    They end after `close`, or `join`, which also says what went wrong.
    """

    def __init__(self, lanes: int) -> None:
        """Begin. Without any lane the jobs are done by whoever joins."""
        self._stop = Event()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._turn = Lock()
        self._failure: BaseException | None = None
        self._ends: list[Event] = []
        try:
            for lane in range(lanes):
                self._ends.append(workers.run(self._lane, name=f"refitd-publish_{lane}"))
        except BaseException:
            self.stop()
            self._end()
            raise

    def add(self, job: Job) -> None:
        """Have one more job done."""
        self._jobs.put(job)

    def close(self) -> None:
        """Add no more: the threads end when they have done what there is."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Have the jobs end early, and begin no others."""
        self._stop.set()

    def join(self, idle: Callable[[], None] | None = None) -> None:
        """Wait for all. Nothing runs any more when this returns or raises, as `in_lanes` does."""
        self.close()
        try:
            if not self._ends:
                self._lane()
            for end in self._ends:
                while not end.wait(None if idle is None else _TELL_SECONDS):
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
            del failure  # the error knows this frame, and would be kept by it

    def _end(self) -> None:
        self.close()
        for end in self._ends:
            end.wait()

    def _lane(self) -> None:
        """Do jobs until there will be no more, or one failed."""
        while (job := self._jobs.get()) is not None and not self._stop.is_set():
            try:
                job(self._stop)
            except BaseException as error:  # raised where all of it was asked for
                self._fail(error)
        self._jobs.put(None)  # for the next lane

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            if not self._stop.is_set():
                self._failure = error
                self._stop.set()
