"""Folders by handle: every step from the root is opened relative to the one before, and a link is never followed.

A path is looked up anew at each use, and between two uses anyone with write access may put a link into it. A handle
stays on the folder that it was opened on. Paths here are relative to the root, with `/` between their parts.

Threads for calls on the root's file system, so that one that hangs blocks no other work.

A call to a network file system whose server is gone may return after hours, or never, and nothing can interrupt it. So
such calls run in threads of their own (asyncio's common ones also serve the API and read keys), with a limit on their
number, and callers stop waiting after a while. The threads are daemons: one that hangs does not delay the end.
"""

import asyncio
import os
import stat
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_folder


@dataclass(frozen=True, slots=True)
class Identity:
    """Which folder it is, whatever its name. Sure only while a handle is open on it: numbers are used again."""

    device: int
    inode: int


def identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_dev, status.st_ino)


def parts_below(path: str) -> tuple[str, ...] | None:
    """The parts of a path that lies strictly under the root and outside the service's own folder, else None."""
    parts = tuple(path.split("/"))
    unsafe = any(part in {"", ".", ".."} or "\0" in part for part in parts)
    return None if unsafe or parts[0] == SERVICE_FOLDER else parts


@contextmanager
def opened(name: str, parent: int) -> Generator[int, None, None]:
    """A handle on the folder `name` in `parent`.

    Raises:
        NotADirectoryError: it is a link or no folder.
        OSError: it cannot be opened.
    """
    handle = open_folder(name, within=parent)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def below(root: int, parts: tuple[str, ...]) -> Generator[int, None, None]:
    """A handle on the folder that `parts` lead to from the root; raises as `opened` does."""
    handle = os.dup(root)
    try:
        for part in parts:
            deeper = open_folder(part, within=handle)
            os.close(handle)
            handle = deeper
        yield handle
    finally:
        os.close(handle)


@contextmanager
def made(name: str, parent: int, mode: int) -> Generator[int, None, None]:
    """A handle on a folder, which is made when it is missing; raises as `opened` does.

    Args:
        parent: a handle on the folder around it.
        mode: the permissions of one that is made.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    with opened(name, parent) as handle:
        yield handle


@contextmanager
def root_at(path: str | os.PathLike[str]) -> Generator[int, None, None]:
    """A handle on the root itself, which the operator names and which may be a link."""
    handle = open_folder(path, follow=True)
    try:
        yield handle
    finally:
        os.close(handle)


def let_through(*folders: int) -> None:
    """Let other users pass through these folders; the files in them have their own permissions."""
    for folder in folders:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode | 0o011 != mode:
            os.fchmod(folder, mode | 0o011)


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
