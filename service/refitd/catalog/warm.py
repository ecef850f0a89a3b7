"""Reading ahead: a version's files are in the page cache when an engine begins to load them, so that it pauses less.

The kernel is asked to read, and nobody waits for it: what was just validated is there already, and what engines are
brought back to after hours may not be. Of a file system in memory there is nothing to read; what another host's engines
have in their caches nobody here can see to.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from refitd.root.threads import LOOK_SECONDS, RootThreads
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_STEP = 2**17  # bytes: what Linux reads ahead where nobody has set it otherwise


class Warmer:
    """Warms folders beneath the root. Engines that go to one version at the same time share one reading."""

    def __init__(self, root: Path, kind: Callable[[], str], threads: RootThreads | None = None) -> None:
        """`kind` says which type of file system the root is on."""
        self._root = root
        self._kind = kind
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._threads = threads or RootThreads()

    async def warm(self, path: str) -> None:
        """Have a folder's files read ahead. Best effort: an error here is for the load to find."""
        task = self._warming.get(path)
        if task is None:
            task = self._warming[path] = asyncio.create_task(self._in_thread(path))
            task.add_done_callback(lambda _: self._warming.pop(path, None))
        await asyncio.shield(task)  # one engine that is let go stops nobody else's

    async def _in_thread(self, path: str) -> None:
        with suppress(OSError):  # a root that hangs as well: that, too, is for the load to find
            await self._threads.run(f"reading {path} ahead", partial(self._warm, path), within=LOOK_SECONDS)

    def _warm(self, path: str) -> None:
        if self._kind() in IN_MEMORY:
            return
        with suppress(OSError, OpeningRefusedError, ChangedError), Folder(self._root, path) as folder:
            for name, file in folder.list().items():
                if name.endswith(".safetensors"):
                    with folder.open(name, file) as fd:
                        _read_ahead(fd, file.size)


def _read_ahead(fd: int, size: int) -> None:
    """The kernel takes no more than one read ahead of each such wish, whatever its length (mm/readahead.c)."""
    for begin in range(0, size, _STEP):
        os.posix_fadvise(fd, begin, _STEP, os.POSIX_FADV_WILLNEED)
