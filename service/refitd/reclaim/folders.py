"""The port to the folders under the root, as the sweep uses it, and the real ones behind it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from refitd.policy.holdings import Holdings
from refitd.reclaim import incoming, looking, slots, trash
from refitd.reclaim.recycler import SlotFolders
from refitd.root.handle import root_at
from refitd.root.leftovers import Slot
from refitd.root.outcome import Discarded, Emptied, Gone, Refused
from refitd.root.threads import LISTING_SECONDS, LOOK_SECONDS, RootThreads

AnswerT = TypeVar("AnswerT")


class Folders(SlotFolders, Protocol):
    """What the sweep asks of the file system. Paths are relative to the root. All raise OSError."""

    async def examine(self, path: str) -> Holdings | Gone | Refused:
        """Say what lies in a folder, that it is gone, or why it must not be touched."""
        ...

    async def weigh(self, paths: Sequence[str]) -> dict[str, Holdings | Gone | Refused]:
        """The same of many folders."""
        ...

    async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
        """Move the folder that was examined into the trash; where it holds files of others, the version's alone."""
        ...

    async def survey(self, runs: Sequence[str], older_than: float) -> list[incoming.Incoming]:
        """All folders in which a version of one of the runs is being written, or was."""
        ...

    async def discard_abandoned(self, path: str, older_than: float) -> Discarded | Gone | Refused:
        """Look once more, and move such a folder into the trash."""
        ...

    async def empty(self) -> Emptied:
        """Delete what lies in the trash."""
        ...

    async def trash_room(self) -> tuple[int, int]:
        """The bytes in the trash that are going to be deleted, and those that are not."""
        ...


class DiskFolders:
    """The file system. Everything happens in threads, one handle on the root for each.

    What only looks is given up after a while; what deletes is not, so that nobody decides anew while it may yet happen.
    """

    def __init__(self, root: Path, threads: RootThreads | None = None) -> None:
        self._root = root
        self._threads = threads or RootThreads()
        self._known: dict[str, Holdings] = {}  # what looks have found, so that files are opened once

    async def examine(self, path: str) -> Holdings | Gone | Refused:
        """See `Folders`."""
        look = self._in_root(lambda root: looking.look(root, path, self._known.get(path)))
        return await self._threads.run(f"looking at {path}", look, within=LOOK_SECONDS)

    async def weigh(self, paths: Sequence[str]) -> dict[str, Holdings | Gone | Refused]:
        """See `Folders`."""
        known = self._known

        def all_in(root: int) -> dict[str, Holdings | Gone | Refused]:
            return {path: looking.look(root, path, known.get(path)) for path in paths}

        found = await self._threads.run("looking at versions", self._in_root(all_in), within=LISTING_SECONDS)
        known |= {path: each for path, each in found.items() if isinstance(each, Holdings)}
        return found

    async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
        """See `Folders`."""

        def discard(root: int) -> Discarded | Gone | Refused:
            if folder.others:
                return trash.discard_files(root, path, folder.identity, folder.files)
            return trash.discard(root, path, folder.identity, folder.seal)

        self._known.pop(path, None)
        return await self._deleting(f"moving {path} away", discard)

    async def survey(self, runs: Sequence[str], older_than: float) -> list[incoming.Incoming]:
        """See `Folders`."""
        look = self._in_root(lambda root: incoming.survey(root, runs, older_than))
        return await self._threads.run("listing what is being written", look, within=LISTING_SECONDS)

    async def discard_abandoned(self, path: str, older_than: float) -> Discarded | Gone | Refused:
        """See `Folders`."""
        return await self._deleting(
            f"moving {path} away", lambda root: incoming.discard_abandoned(root, path, older_than)
        )

    async def hand_back(self, discarded: Discarded, run: str) -> Slot | Refused:
        """See `SlotFolders`."""
        return await self._deleting("handing a slot back", lambda root: slots.hand_back(root, discarded, run))

    async def slots(self) -> list[Slot]:
        """See `SlotFolders`."""
        return await self._threads.run("listing the slots", self._in_root(slots.survey), within=LOOK_SECONDS)

    async def withdraw(self, slot: Slot) -> Discarded | Gone | Refused:
        """See `SlotFolders`."""
        return await self._deleting("moving a slot away", lambda root: slots.withdraw(root, slot))

    async def layout(self, path: str) -> str | None:
        """See `SlotFolders`."""
        look = self._in_root(lambda root: slots.layout_at(root, path))
        return await self._threads.run(f"looking at {path}", look, within=LOOK_SECONDS)

    async def empty(self) -> Emptied:
        """See `Folders`."""
        stop = threading.Event()
        return await self._deleting("emptying the trash", lambda root: trash.empty(root, stop.is_set), stop)

    async def trash_room(self) -> tuple[int, int]:
        """See `Folders`."""
        return await self._threads.run("looking into the trash", self._in_root(trash.room), within=LOOK_SECONDS)

    def _in_root(self, work: Callable[[int], AnswerT]) -> Callable[[], AnswerT]:
        """File work for a thread. It opens the root for itself: a handle shared with it could be closed under it."""

        def in_root() -> AnswerT:
            with root_at(self._root) as root:
                return work(root)

        return in_root

    async def _deleting(
        self, what: str, work: Callable[[int], AnswerT], stop: threading.Event | None = None
    ) -> AnswerT:
        """A thread cannot be cancelled. So a cancellation asks it to stop and waits: nothing is deleted after its end.

        A file system that hangs is not waited for: what it does to that one folder was decided, and is written down.
        """
        task = asyncio.ensure_future(self._threads.run(what, self._in_root(work)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait({task}, timeout=LOOK_SECONDS)
            task.cancel()
            raise
