"""Threads for whatever looks at the root: a file system that hangs keeps its thread, and nobody else's.

A call to a network file system whose server is gone may return after hours, or never, and nothing can interrupt it.
So such calls have threads of their own (asyncio's common ones also serve the API and read keys), only so many at a
time, and callers that stop waiting. The threads are daemons: one that hangs does not hold up the end of the service.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

MOST = 8  # calls at a time; two of them may be reading all of a version, one deleting; who writes copies has others
LOOK_SECONDS = 10.0  # an engine may be paused while its version's files are looked at
LISTING_SECONDS = 30.0  # a thousand versions on a slow network file system

AnswerT = TypeVar("AnswerT")


class RootHangsError(OSError):
    """The file system under the root does not answer; the text says for how long it was waited for, and for what."""


class RootThreads:
    """Runs calls in threads. One that was given up goes on in its thread, and counts among `most` until it returns."""

    def __init__(self, most: int = MOST) -> None:
        self._free = asyncio.Semaphore(most)

    async def run(self, what: str, call: Callable[[], AnswerT], *, within: float | None = None) -> AnswerT:
        """What `call` returns or raises; at most `within` seconds are spent on it, and on waiting for a thread.

        Raises:
            RootHangsError: it did not return in time. It may still do its work later: only let it look, or make sure
                that what it does late is as good as in time.
        """
        deadline = asyncio.timeout(within)
        try:
            async with deadline:
                await self._free.acquire()
                return await asyncio.wrap_future(self._started(what, call))
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the file system's own, from within the call
            raise RootHangsError(
                f"the file system does not answer: {what} took more than {within:g} s; see whether its server is "
                "reachable ('stat -f' there); this goes on by itself when it answers again"
            ) from error

    def _started(self, what: str, call: Callable[[], AnswerT]) -> Future[AnswerT]:
        done: Future[AnswerT] = Future()
        done.set_running_or_notify_cancel()  # whoever stops waiting cancels only the waiting
        done.add_done_callback(partial(self._release, asyncio.get_running_loop()))
        threading.Thread(target=_settle, args=(done, call), name=what, daemon=True).start()
        return done

    def _release(self, loop: asyncio.AbstractEventLoop, _: Future[AnswerT]) -> None:
        with suppress(RuntimeError):  # it came back after the end of the loop
            loop.call_soon_threadsafe(self._free.release)


def _settle(done: Future[AnswerT], call: Callable[[], AnswerT]) -> None:
    try:
        answer = call()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(answer)
