"""The folders of copies: listed, written, looked at and deleted."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar
from uuid import uuid4

from refitd.catalog.files import Unreadable
from refitd.materialize.writing import CopyJob, invalidate, look, read_note, write_copy
from refitd.policy.materialize import WriteCopy
from refitd.reclaim.trash import condemn, empty, empty_one
from refitd.root.handle import let_through, made, opened, root_at
from refitd.root.outcome import Discarded, Gone, Refused, sentence
from refitd.root.threads import LISTING_SECONDS, LOOK_TIMEOUT_SECONDS, RootHangsError, RootThreads
from refitd.state.copy import (
    COPIES,
    COPIES_PATH,
    NOTE_ENDING,
    Copy,
    doubted,
    is_copy_name,
)
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER, Order, run_of_slots, run_slots

AnswerT = TypeVar("AnswerT")


class DiskCopies:
    """Copies in the root, or in a folder of their own. Everything happens in threads.

    Looks share `threads` with other looks at the root, and have a time limit: an engine may be paused for them. Work
    that reads, writes or deletes whole copies has threads of its own and no limit. All methods raise OSError.
    """

    def __init__(self, root: Path, folder: Path | None = None, threads: RootThreads | None = None) -> None:
        self._root = root
        self._own = folder is not None
        own_name = f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"  # services may share a folder
        self._top = root if folder is None else folder / own_name
        self._looks = threads or RootThreads()
        self._works = RootThreads()
        self._prefix = COPIES_PATH if folder is None else str(self._top)

    async def survey(self) -> list[Copy]:
        """Return all copies, and what else lies among them."""
        return await self._looks.run(f"listing {self._top}", self._survey, within=LISTING_SECONDS)

    async def write(self, order: WriteCopy) -> Copy:
        """Write a copy; raises CopyError where it was not written, or not well."""
        return await self._in_thread(lambda stop: self._write(order, stop))

    async def signature(self, copy: Copy) -> str | Unreadable | None:
        """Return the signature of a copy's files; None where it is gone."""
        look = partial(self._signature, copy)
        try:
            return await self._looks.run(f"looking at {copy.path}", look, within=LOOK_TIMEOUT_SECONDS)
        except RootHangsError as error:
            return Unreadable(str(error))

    async def discard(self, copy: Copy) -> Discarded | Gone | Refused:
        """Delete a copy."""
        return await self._in_thread(lambda _: self._discard(copy))

    async def _in_thread(self, work: Callable[[Event], AnswerT]) -> AnswerT:
        """Run in a thread. It cannot be cancelled, so a cancellation asks it to stop and waits: it writes no more."""
        stop = Event()
        task = asyncio.ensure_future(self._works.run(f"work in {self._top}", partial(work, stop)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({task}, timeout=LOOK_TIMEOUT_SECONDS)  # a file system that hangs ends nothing either
            raise

    def _survey(self) -> list[Copy]:
        with suppress(FileNotFoundError), self._copies(make=False) as copies:
            names = sorted(name for name in os.listdir(copies) if not name.startswith("."))
            return [copy for name in names for copy in self._of_run(copies, name)]
        return []

    def _of_run(self, copies: int, folder: str) -> Iterator[Copy]:
        run = run_of_slots(folder)
        try:
            with opened(folder, copies) as mine:
                yield from self._in_run(mine, run, folder)
        except (NotADirectoryError, PermissionError) as error:
            yield Copy(run=run, name=folder, path=f"{self._prefix}/{folder}", fault=f"is not deleted: {error.strerror}")

    def _in_run(self, mine: int, run: str, folder: str) -> Iterator[Copy]:
        for name in sorted(os.listdir(mine)):
            bare = name.removeprefix(".").removesuffix(NOTE_ENDING)
            if not is_copy_name(bare):
                fault = "was not put there by this service: it is not deleted"
                yield Copy(run=run, name=name, path=self._path(folder, name), fault=fault)
            elif bare == name:
                yield self._look(mine, run, folder, name)

    def _look(self, mine: int, run: str, folder: str, name: str) -> Copy:
        copy = Copy(run=run, name=name, path=self._path(folder, name))
        with suppress(OSError), opened(name, mine) as files:
            signature, size = look(files)
            copy = replace(copy, bytes=size)
            note = read_note(mine, name, run)
            if note is not None:
                order = Order(note.generation, note.step)
                copy = replace(copy, order=order, digest=note.digest, signature=note.signature)
                return copy if note.signature == signature else doubted(copy)
        return copy

    def _write(self, order: WriteCopy, stop: Event) -> Copy:
        folder = run_slots(order.target.run)
        name = uuid4().hex if order.into is None else order.into.name
        with self._copies(make=True) as copies, made(folder, copies, 0o755) as run:
            try:
                return write_copy(self._root, run, self._path(folder, name), self._job(order, name), stop)
            except BaseException:
                if order.into is None:  # it is no copy yet, and its room may be what is missing
                    with suppress(OSError):
                        self._condemn(run, name)
                raise

    def _job(self, order: WriteCopy, name: str) -> CopyJob:
        source = order.source
        is_version = isinstance(source, VersionRecord)
        path = f"{run_slots(source.run)}/{source.name}" if isinstance(source, Copy) else source.path
        if isinstance(source, Copy) and not self._own:
            path = f"{COPIES_PATH}/{path}"
        return CopyJob(
            name=name,
            top=self._root if is_version else self._top,
            source=path,
            source_copy=None if is_version else source.name,
            signature=source.signature,
            deltas=order.deltas,
        )

    def _signature(self, copy: Copy) -> str | Unreadable | None:
        try:
            with self._opened(copy) as folder:
                return look(folder)[0]
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unreadable(str(error))

    @contextmanager
    def _opened(self, copy: Copy) -> Generator[int]:
        with (
            self._copies(make=False) as copies,
            opened(run_slots(copy.run), copies) as run,
            opened(copy.name, run) as folder,
        ):
            yield folder

    def _discard(self, copy: Copy) -> Discarded | Gone | Refused:
        try:
            with self._copies(make=False) as copies, opened(run_slots(copy.run), copies) as run:
                invalidate(run, copy.name)
                with suppress(FileNotFoundError):
                    os.unlink(f".{copy.name}{NOTE_ENDING}", dir_fd=run)
                self._condemn(run, copy.name)
            with self._copies(make=False) as copies, suppress(OSError):  # there are more
                os.rmdir(run_slots(copy.run), dir_fd=copies)
        except FileNotFoundError:
            return Gone(copy.path)
        except OSError as error:
            return Refused(copy.path, sentence(copy.path, error))
        return Discarded(copy.path)

    def _condemn(self, run: int, name: str) -> None:
        """Move a copy into the trash of the same file system, and delete it there."""
        with root_at(self._top) as top:
            where = condemn(top, run, name)
            if self._own:  # nothing else empties this trash
                empty(top)
            else:
                empty_one(top, where)

    def _path(self, folder: str, name: str) -> str:
        return f"{self._prefix}/{folder}/{name}"

    @contextmanager
    def _copies(self, *, make: bool) -> Generator[int]:
        """Give a handle on the folder above the folders of runs."""
        if self._own:
            if make:
                self._top.mkdir(parents=True, exist_ok=True)
            with root_at(self._top) as copies:
                yield copies
            return
        enter = _made if make else opened
        with root_at(self._root) as root, enter(SERVICE_FOLDER, root) as own, enter(COPIES, own) as copies:
            if make:
                let_through(own)
            yield copies


@contextmanager
def _made(name: str, parent: int) -> Generator[int]:
    with made(name, parent, 0o755) as handle:
        yield handle
