"""Work that is shared out over threads, and stops as a whole: at the first error, or when its caller is interrupted.

numpy, xxhash and the kernel let go of the interpreter's lock while they copy, digest and sync, so threads do help.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event

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
    stop = Event()
    if lanes == 1 or len(jobs) < 2:
        for job in jobs:
            job(stop)
        return
    with ThreadPoolExecutor(lanes, thread_name_prefix="refitd-publish") as pool:
        futures = [pool.submit(job, stop) for job in jobs]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, None if idle is None else _TELL_SECONDS, FIRST_EXCEPTION)
                if idle is not None:
                    idle()
                for future in done:
                    future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
