"""The folders of copies: listed, made, looked at and deleted."""

import asyncio
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar
from uuid import uuid4

from refitd.catalog.files import Unreadable
from refitd.policy.materialize import COPIES, COPIES_PATH, Copy, MakeCopy, copy_name, order_in
from refitd.reclaim.trash import condemn, empty_one
from refitd.root.handle import (
    LISTING_SECONDS,
    LOOK_TIMEOUT_SECONDS,
    RootHangsError,
    RootThreads,
    let_through,
    made,
    opened,
    root_at,
)
from refitd.root.scan import Discarded, Gone, Refused, sentence
from refitd_client.contract.naming import SERVICE_FOLDER, run_of_slots, run_slots
from refitd_inside.materialize.writing import look, write_copy

AnswerT = TypeVar("AnswerT")


class DiskCopies:
    """Copies in the root. Everything happens in threads.

    Looks share `threads` with other looks at the root, and have a time limit: an engine may be paused for them. Work
    that reads, writes or deletes whole copies has threads of its own and no limit. All methods raise OSError.
    """

    def __init__(self, root: Path, threads: RootThreads | None = None) -> None:
        self._root = root
        self._looks = threads or RootThreads()
        self._works = RootThreads()

    async def survey(self) -> list[Copy]:
        """Return all that lies there. What the folders hold is not known."""
        return await self._looks.run(f"listing {COPIES_PATH}", self._survey, within=LISTING_SECONDS)

    async def write(self, order: MakeCopy) -> Copy:
        return await self._in_thread(lambda stop: self._write(order, stop))

    async def signature(self, copy: Copy) -> str | Unreadable | None:
        """Return the signature of a copy's files; None where it is gone."""
        look = partial(self._signature, copy)
        try:
            return await self._looks.run(f"looking at {copy.path}", look, within=LOOK_TIMEOUT_SECONDS)
        except RootHangsError as error:
            return Unreadable(str(error))

    async def discard(self, copy: Copy) -> Discarded | Gone | Refused:
        return await self._in_thread(lambda _: self._discard(copy))

    async def _in_thread(self, work: Callable[[Event], AnswerT]) -> AnswerT:
        """Run work in a thread. A thread cannot be cancelled: a cancellation asks the work to stop, and waits until
        nothing is written any more.
        """
        stop = Event()
        task = asyncio.ensure_future(self._works.run(f"work in {COPIES_PATH}", partial(work, stop)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({task}, timeout=LOOK_TIMEOUT_SECONDS)  # a file system that hangs ends nothing either
            raise

    def _survey(self) -> list[Copy]:
        with suppress(FileNotFoundError), self._copies() as copies:
            return [copy for name in sorted(os.listdir(copies)) for copy in _of_run(copies, name)]
        return []

    def _write(self, order: MakeCopy, stop: Event) -> Copy:
        target = order.target
        folder, name = run_slots(target.run), copy_name(target.order, uuid4().hex)
        copy = Copy(run=target.run, name=name, path=f"{COPIES_PATH}/{folder}/{name}", order=target.order)
        with self._copies(make=True) as copies, made(folder, copies, 0o755) as run:
            try:
                return write_copy(self._root, run, copy, order, stop)
            except BaseException:
                with suppress(OSError):  # its room may be what is missing
                    self._condemn(run, name)
                raise

    def _signature(self, copy: Copy) -> str | Unreadable | None:
        try:
            with self._run_of(copy) as run, opened(copy.name, run) as folder:
                return look(folder)[0]
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unreadable(str(error))

    def _discard(self, copy: Copy) -> Discarded | Gone | Refused:
        try:
            with self._run_of(copy) as run:
                self._condemn(run, copy.name)
            with self._copies() as copies, suppress(OSError):  # there are more
                os.rmdir(run_slots(copy.run), dir_fd=copies)
        except FileNotFoundError:
            return Gone(copy.path)
        except OSError as error:
            return Refused(copy.path, sentence(copy.path, error))
        return Discarded(copy.path)

    def _condemn(self, run: int, name: str) -> None:
        with root_at(self._root) as root:
            empty_one(root, condemn(root, run, name))

    @contextmanager
    def _run_of(self, copy: Copy) -> Generator[int]:
        with self._copies() as copies, opened(run_slots(copy.run), copies) as run:
            yield run

    @contextmanager
    def _copies(self, *, make: bool = False) -> Generator[int]:
        """Give a handle on the folder above the folders of runs."""
        with root_at(self._root) as root:
            if not make:
                with opened(SERVICE_FOLDER, root) as own, opened(COPIES, own) as copies:
                    yield copies
                return
            with made(SERVICE_FOLDER, root, 0o755) as own, made(COPIES, own, 0o755) as copies:
                let_through(own)
                yield copies


def _of_run(copies: int, folder: str) -> Iterator[Copy]:
    run, path = run_of_slots(folder), f"{COPIES_PATH}/{folder}"
    try:
        with opened(folder, copies) as mine:
            for name in sorted(os.listdir(mine)):
                order, size = order_in(name), 0
                with suppress(OSError), opened(name, mine) as found:
                    size = look(found)[1]
                fault = None if order is not None else "was not put there by this service: it is not deleted"
                yield Copy(run=run, name=name, path=f"{path}/{name}", bytes=size, order=order, fault=fault)
    except (NotADirectoryError, PermissionError) as error:
        yield Copy(run=run, name=folder, path=path, fault=f"is not deleted: {error.strerror}")
