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
    work = _Work(jobs)
    if lanes == 1 or len(jobs) < 2:
        work.lane()
    else:
        _run([Thread(target=work.lane, name=f"refitd-publish_{lane}") for lane in range(lanes)], work.stop, idle)
    try:
        if work.failure is not None:
            raise work.failure
    finally:
        del work  # the error knows this frame, and would be kept by it


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

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            if not self.stop.is_set():
                self.failure = error
                self.stop.set()


def _run(threads: Sequence[Thread], stop: Event, idle: Callable[[], None] | None) -> None:
    """Threads of their own: a pool takes nothing any more while the interpreter waits for what goes on at its end."""
    begun: list[Thread] = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
        for thread in begun:
            while thread.is_alive():
                thread.join(None if idle is None else _TELL_SECONDS)
                if idle is not None:
                    idle()
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in begun:
            thread.join()
