"""The port to the folders under the root, as the sweep uses it, and the real ones behind it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from refitd.reclaim import incoming, slots, trash
from refitd.reclaim.handle import Identity, root_at
from refitd.reclaim.outcome import Discarded, Emptied, Gone, Refused
from refitd.reclaim.recycler import SlotFolders
from refitd.reclaim.slots import Slot

AnswerT = TypeVar("AnswerT")


class Folders(SlotFolders, Protocol):
    """What the sweep asks of the file system. Paths are relative to the root. All raise OSError."""

    async def examine(self, path: str) -> Identity | Gone | Refused:
        """Say which folder lies there, that it is gone, or why it must not be touched."""
        ...

    async def discard(self, path: str, folder: Identity) -> Discarded | Gone | Refused:
        """Move the folder that was examined into the trash."""
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


class DiskFolders:
    """The file system. Everything happens in threads, one handle on the root for each."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def examine(self, path: str) -> Identity | Gone | Refused:
        """See `Folders`."""
        return await self._in_thread(lambda root: trash.examine(root, path))

    async def discard(self, path: str, folder: Identity) -> Discarded | Gone | Refused:
        """See `Folders`."""
        return await self._in_thread(lambda root: trash.discard(root, path, folder))

    async def survey(self, runs: Sequence[str], older_than: float) -> list[incoming.Incoming]:
        """See `Folders`."""
        return await self._in_thread(lambda root: incoming.survey(root, runs, older_than))

    async def discard_abandoned(self, path: str, older_than: float) -> Discarded | Gone | Refused:
        """See `Folders`."""
        return await self._in_thread(lambda root: incoming.discard_abandoned(root, path, older_than))

    async def hand_back(self, discarded: Discarded, run: str) -> Slot | Refused:
        """See `SlotFolders`."""
        return await self._in_thread(lambda root: slots.hand_back(root, discarded, run))

    async def slots(self) -> list[Slot]:
        """See `SlotFolders`."""
        return await self._in_thread(slots.survey)

    async def withdraw(self, slot: Slot) -> Discarded | Gone | Refused:
        """See `SlotFolders`."""
        return await self._in_thread(lambda root: slots.withdraw(root, slot))

    async def layout(self, path: str) -> str | None:
        """See `SlotFolders`."""
        return await self._in_thread(lambda root: slots.layout_at(root, path))

    async def empty(self) -> Emptied:
        """See `Folders`."""
        stop = threading.Event()
        return await self._in_thread(lambda root: trash.empty(root, stop.is_set), stop)

    async def _in_thread(self, work: Callable[[int], AnswerT], stop: threading.Event | None = None) -> AnswerT:
        """Do file work in a thread that opens the root for itself: a handle shared with it could be closed under it.

        A thread cannot be cancelled. So a cancellation asks it to stop and waits: nothing is deleted after its end.
        """

        def in_root() -> AnswerT:
            with root_at(self._root) as root:
                return work(root)

        task = asyncio.ensure_future(asyncio.to_thread(in_root))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait({task})
            raise
