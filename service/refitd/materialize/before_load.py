"""What is done right before a load, for every kind of version: a last check of the files, and reading them ahead.

Files are read ahead into the page cache, so that the engine pauses less. The kernel is asked to read and is not waited
for: what was just validated is in the cache already, what engines go back to after hours may not be. A file system in
memory needs none of it, and the caches of other hosts cannot be reached from here.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from refitd.materialize.materializer import Materializer
from refitd.policy.goals import LoadableDeltas
from refitd.root.handle import LOOK_TIMEOUT_SECONDS, RootThreads
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.contract.states import Kind

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_STEP = 2**17  # bytes: what Linux reads ahead where it is not set otherwise


class Warmer:
    """Warms folders beneath the root. Engines that go to one version at the same time share one reading."""

    def __init__(self, root: Path, kind: Callable[[], str], threads: RootThreads | None = None) -> None:
        """`kind` returns the type of the root's file system."""
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
        await asyncio.shield(task)  # one engine that is cancelled stops no other's reading

    async def _in_thread(self, path: str) -> None:
        with suppress(OSError):  # of a root that hangs as well: that, too, is for the load to find
            await self._threads.run(f"reading {path} ahead", partial(self._warm, path), within=LOOK_TIMEOUT_SECONDS)

    def _warm(self, path: str) -> None:
        if self._kind() in IN_MEMORY:
            return
        with suppress(OSError, OpeningRefusedError, ChangedError), Folder(self._root, path) as folder:
            for name, file in folder.list().items():
                if name.endswith(".safetensors"):
                    with folder.open(name, file) as fd:
                        # The kernel reads one step ahead for each call, whatever its length (mm/readahead.c).
                        for begin in range(0, file.size, _STEP):
                            os.posix_fadvise(fd, begin, _STEP, os.POSIX_FADV_WILLNEED)


class BeforeLoad:
    """Checks and warms full versions, and deltas written in place, in their own folders; other deltas in their copies.

    Args:
        full: checks a full version.
        materializer: checks a copy.
        warmer: reads folders ahead.
        carriage: where engines load a version from.
    """

    def __init__(
        self,
        full: Callable[[VersionRecord], Awaitable[bool]],
        materializer: Materializer,
        warmer: Warmer,
        carriage: LoadableDeltas,
    ) -> None:
        self._full = full
        self._materializer = materializer
        self._warmer = warmer
        self._carriage = carriage

    async def check(self, version: VersionRecord, *, in_place: bool = False) -> bool:
        """As `refitd.update.reconciler.FilesCheck`."""
        is_copy = version.kind is Kind.DELTA and not in_place
        return await (self._materializer.check(version) if is_copy else self._full(version))

    async def warm(self, version: VersionRecord) -> None:
        """Read the files ahead, of versions and copies in the root."""
        path = self._carriage.path_of(version)
        if path is not None and not path.startswith("/"):
            await self._warmer.warm(path)
