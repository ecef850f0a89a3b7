"""Threads for calls on the root's file system, so that one that hangs blocks no other work.

A call to a network file system whose server is gone may return after hours, or never, and nothing can interrupt it. So
such calls run in threads of their own (asyncio's common ones also serve the API and read keys), with a limit on their
number, and callers stop waiting after a while. The threads are daemons: one that hangs does not delay the end.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

MOST = 8  # calls at a time; two may be reading all of a version, one deleting; writing copies has threads of its own
LOOK_TIMEOUT_SECONDS = 10.0  # an engine may be paused while its version's files are looked at
LISTING_SECONDS = 30.0  # a thousand versions on a slow network file system

AnswerT = TypeVar("AnswerT")


class RootHangsError(OSError):
    """The file system under the root does not answer; the text says what was asked and for how long."""


class RootThreads:
    """Runs calls in threads. A call that was given up goes on in its thread, and counts in `most` until it returns."""

    def __init__(self, most: int = MOST) -> None:
        self._free = asyncio.Semaphore(most)

    async def run(self, what: str, call: Callable[[], AnswerT], *, within: float | None = None) -> AnswerT:
        """What `call` returns or raises.

        Args:
            what: says in errors what the call does.
            call: the work; it blocks.
            within: seconds for the call and the wait for a thread, None without a limit.

        Raises:
            RootHangsError: it did not return in time. It may still do its work later: give a limit only to calls that
                read, or whose late effect does no harm.
        """
        deadline = asyncio.timeout(within)
        try:
            async with deadline:
                await self._free.acquire()
                loop, done = asyncio.get_running_loop(), Future[AnswerT]()
                done.set_running_or_notify_cancel()  # a caller that stops waiting cancels only the waiting

                def release(_: Future[AnswerT]) -> None:
                    with suppress(RuntimeError):  # the call returned after the end of the loop
                        loop.call_soon_threadsafe(self._free.release)

                done.add_done_callback(release)
                threading.Thread(target=_settle, args=(done, call), name=what, daemon=True).start()
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the file system's own, from within the call
            raise RootHangsError(
                f"the file system does not answer: {what} took more than {within:g} s; see whether its server is "
                "reachable ('stat -f' there); this goes on by itself when it answers again"
            ) from error


def _settle(done: Future[AnswerT], call: Callable[[], AnswerT]) -> None:
    try:
        answer = call()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(answer)
