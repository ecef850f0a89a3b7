"""What is left of a publication when its trainer goes on: one at a time, in order, in a thread of the publisher's.

An error is raised once: to the caller that waits for that publication, or else by the next call of the publisher, or by
its `close`. At the end of the interpreter, and when a publisher is garbage-collected, what was begun is finished first,
and an error that no caller got is logged. A process that is killed leaves nothing visible.
"""

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd_client.publish.publication import Publication

_log = logging.getLogger("refitd_client")


class PendingPublication:
    """A publication that goes on in the background. `was_read`: a caller has got its result or its error."""

    def __init__(self, future: "Future[Publication]") -> None:
        self._future = future
        self.was_read = False

    def log_error(self) -> None:
        """Log the error, if there is one and no caller gets it before."""

        def log(future: "Future[Publication]") -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and not self.was_read:
                self.was_read = True
                _log.error("a publication has failed in the background, and nothing waited for it: %s", error)

        self._future.add_done_callback(log)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call something when the publication has ended, in whatever way; at once if it has."""
        self._future.add_done_callback(lambda _: call())

    def get(self, timeout: float | None = None) -> "Publication":
        """Wait for it, `timeout` seconds. Raises what the publication raised, or TimeoutError."""
        done, _ = wait([self._future], timeout)
        if not done:
            raise TimeoutError
        self.was_read = True
        return self._future.result()


class Background:
    """The thread, made when it is first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: PendingPublication | None = None
        self.begun: list[PendingPublication] = []  # the last one, for finalizers: they must not know this object
        weakref.finalize(self, _log_errors, self.begun)  # at the end of the interpreter, too: threads have ended then

    def begin(self, work: "Callable[[], Publication]") -> PendingPublication:
        """Have `work` done by the thread. Call `settle` before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="refitd-publisher")
        self._last = PendingPublication(self._pool.submit(work))
        self.begun[:] = [self._last]
        return self._last

    def settle(self) -> None:
        """Wait for what is under way. Raises its error, if no caller has got it."""
        last = self._last
        if last is None:
            return
        try:
            if not last.was_read:
                last.get()
        finally:
            self._last = None if last.was_read else last  # an interrupted wait has read nothing

    def close(self) -> None:
        """Wait for what is under way, and end the thread. Raises as `settle` does."""
        try:
            self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _log_errors(begun: list[PendingPublication]) -> None:
    for pending in begun:
        pending.log_error()
