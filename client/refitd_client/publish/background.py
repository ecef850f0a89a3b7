"""What is left of a publication when its trainer goes on: one at a time, in order, in a thread of the publisher's.

An error is raised once: by whoever waits for that publication, or else by the next call of the publisher, or by its
`close`. At the end of the interpreter what was begun is finished first, and an error that nobody was left to hear of is
logged; so it is when the publisher is let go of. A process that is killed leaves nothing that anyone sees.
"""

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd_client.publish.publication import Publication

_log = logging.getLogger("refitd_client")


class Outcome:
    """How a publication that goes on in the background will end."""

    def __init__(self, future: "Future[Publication]") -> None:
        """Of what was begun."""
        self._future = future
        self.heard = False

    def tell(self) -> None:
        """Log the error, when there is one, unless somebody hears of it before."""
        self._future.add_done_callback(self._tell)

    def _tell(self, future: "Future[Publication]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self.heard:
            self.heard = True
            _log.error("a publication has failed in the background, and nobody waited for it: %s", error)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have something called when it has ended, however; at once, where it has."""
        self._future.add_done_callback(lambda _: call())

    def get(self, timeout: float | None = None) -> "Publication":
        """Wait for it. Raises what the publication raised, or TimeoutError."""
        done, _ = wait([self._future], timeout)
        if not done:
            raise TimeoutError
        self.heard = True
        return self._future.result()


class Background:
    """The thread, made when it is first needed."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._pool: ThreadPoolExecutor | None = None
        self._last: Outcome | None = None
        self.begun: list[Outcome] = []  # the last, for whoever acts when this is gone
        weakref.finalize(self, _tell_of, self.begun)  # at the end of the interpreter, too: threads have ended then

    def begin(self, work: "Callable[[], Publication]") -> Outcome:
        """Have something done. Call `settle` before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="refitd-publisher")
        self._last = Outcome(self._pool.submit(work))
        self.begun[:] = [self._last]
        return self._last

    def settle(self) -> None:
        """Wait for what is under way. Raises its error, if nobody has heard of it."""
        last = self._last
        if last is None:
            return
        try:
            if not last.heard:
                last.get()
        finally:
            self._last = None if last.heard else last  # an interrupted wait has not heard

    def close(self) -> None:
        """Wait for what is under way, and end the thread. Raises as `settle` does."""
        try:
            self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _tell_of(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.tell()
