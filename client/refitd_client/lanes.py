"""Work that is shared out over threads, and stops as a whole: at the first error, or when its caller is interrupted.

numpy, xxhash and the kernel let go of the interpreter's lock while they copy, digest and sync, so threads do help.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

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
    if lanes > 1 and len(jobs) > 1:
        Lanes(jobs, lanes).join(idle)
        return
    work = _Work(jobs)
    work.lane()
    try:
        work.end()
    finally:
        del work  # the error knows this frame, and would be kept by it


class Lanes:
    """Jobs that go on while their caller does something else. `join` must be called.

    They have threads of their own: a pool takes nothing any more while the interpreter waits for what goes on at its
    end.
    """

    def __init__(self, jobs: Sequence[Job], lanes: int) -> None:
        """Begin."""
        self._work = _Work(jobs)
        self._threads: list[Thread] = []
        try:
            for lane in range(lanes):
                thread = Thread(target=self._work.lane, name=f"refitd-publish_{lane}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop()
            self._wait()
            raise

    def stop(self) -> None:
        """Have the jobs end early."""
        self._work.stop.set()

    def join(self, idle: Callable[[], None] | None = None) -> None:
        """Wait for all. Nothing runs any more when this returns or raises, as `in_lanes` does."""
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(None if idle is None else _TELL_SECONDS)
                    if idle is not None:
                        idle()
        except BaseException:
            self.stop()
            raise
        finally:
            self._wait()
        self._work.end()

    def _wait(self) -> None:
        for thread in self._threads:
            thread.join()


class _Work:
    """Jobs that wait for a lane, and the first error."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.stop = Event()
        self.failure: BaseException | None = None
        self._jobs = deque(jobs)
        self._turn = Lock()

    def lane(self) -> None:
        """Do jobs until there are none, or one failed."""
        while self._jobs and not self.stop.is_set():
            try:
                job = self._jobs.popleft()
            except IndexError:  # another lane was faster
                return
            try:
                job(self.stop)
            except BaseException as error:  # raised where all of it was asked for
                self._fail(error)

    def end(self) -> None:
        """Raise the first error, once."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the error knows this frame, and would be kept by it

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            if not self.stop.is_set():
                self.failure = error
                self.stop.set()
