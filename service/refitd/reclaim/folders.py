"""The folders under the root, as reclaim looks at them, moves them away and deletes them.

The look into a version's folder comes before anything of it is deleted (`policy/holdings.py` decides). Everything is
read by handle, beneath the root, and no link is followed. What a look costs is bounded: so many names at the folder's
top, so many more in the folders that lie in it, and the header alone of each weight file.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from refitd.policy.holdings import FolderEntry, Holdings, is_weights, sort_out
from refitd.reclaim import incoming, slots, trash
from refitd.reclaim.trash import MAX_COUNTED, entries_of, examine, room_within, seal_of
from refitd.root.handle import (
    LISTING_SECONDS,
    LOOK_TIMEOUT_SECONDS,
    Identity,
    RootThreads,
    below,
    identity_of,
    parts_below,
    root_at,
)
from refitd.root.scan import Discarded, Emptied, Gone, Refused, Slot, sentence
from refitd_client.checkpoint.header import HeaderRefusedError, TornFileError, read_header
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.files.plain_file import plain_file, read_at
from refitd_client.validation.foreign import forget_manifests

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header


def look_at(root: int, path: str, known: Holdings | None = None) -> Holdings | Gone | Refused:
    """Say what lies in the folder at `path` and which of it refitd may delete. Changes nothing.

    `known` is what an earlier look said: where nothing has changed since, no file is opened again.
    """
    folder = examine(root, path)
    if not isinstance(folder, Identity):
        return folder
    try:
        with below(root, parts_below(path) or ("",)) as handle:
            if identity_of(os.fstat(handle)) != folder:
                return Refused(path, f"{path} was replaced while it was looked at: it is tried again the next time")
            return _look(handle, path, folder, known)
    except FileNotFoundError:
        return Gone(path)
    except OSError as error:
        return Refused(path, sentence(path, error))


def _look(folder: int, path: str, identity: Identity, known: Holdings | None) -> Holdings:
    entries = entries_of(folder)
    seal = seal_of(entries)
    if known is not None and (known.identity, known.seal) == (identity, seal):
        return known
    intact = [
        name for name, entry in entries.items() if entry.is_file and is_weights(name) and _is_intact(folder, name)
    ]
    mine, others = sort_out(path, entries, manifest=_manifest(folder, entries), intact=intact)
    left = [MAX_COUNTED]  # so many names are counted in the folders that lie in it
    inside = sum(room_within(folder, name, left) for name, entry in entries.items() if not entry.is_file)
    return Holdings(
        identity=identity,
        seal=seal,
        files={name: entries[name].stamp for name in mine},
        others=tuple(others),
        bytes=sum(entries[name].bytes for name in mine),
        foreign_bytes=sum(entries[name].bytes for name in others) + inside,
    )


def _manifest(folder: int, entries: Mapping[str, FolderEntry]) -> Manifest | None:
    entry = entries.get(MANIFEST_NAME)
    if entry is None or not entry.is_file:
        return None
    try:
        with _opened_file(folder, MANIFEST_NAME) as (handle, size):
            return parse_manifest(read_at(handle, size, 0)) if size <= MAX_MANIFEST_BYTES else None
    except (OSError, ManifestRefusedError):
        return None


def _is_intact(folder: int, name: str) -> bool:
    """Whether a weight file has the header of one. What follows the header may be cut off."""
    try:
        with _opened_file(folder, name) as (handle, size):
            try:
                read_header(handle, size)
            except TornFileError:
                length = int.from_bytes(read_at(handle, _LENGTH_BYTES, 0), "little")
                return _LENGTH_BYTES + length <= size
    except (OSError, HeaderRefusedError):
        return False
    return True


@contextmanager
def _opened_file(folder: int, name: str) -> Generator[tuple[int, int]]:
    with plain_file(name, within=folder) as handle:
        yield handle, os.fstat(handle).st_size


AnswerT = TypeVar("AnswerT")


class DiskFolders:
    """The folders under the root, by paths relative to it. All methods raise OSError.

    Everything happens in threads, one handle on the root for each. A call that only reads is given up after a while.
    One
    that deletes is not, so that no new decision is made while it may still happen.
    """

    def __init__(self, root: Path, threads: RootThreads | None = None) -> None:
        self._root = root
        self._threads = threads or RootThreads()
        self._known: dict[str, Holdings] = {}  # what looks have found, so that files are opened once

    async def examine(self, path: str) -> Holdings | Gone | Refused:
        """Say what lies in a folder, that it is gone, or why it must not be touched."""
        return await self._look(f"looking at {path}", lambda root: look_at(root, path, self._known.get(path)))

    async def weigh(self, paths: Sequence[str]) -> dict[str, Holdings | Gone | Refused]:
        known = self._known

        def all_in(root: int) -> dict[str, Holdings | Gone | Refused]:
            return {path: look_at(root, path, known.get(path)) for path in paths}

        found = await self._look("looking at versions", all_in, LISTING_SECONDS)
        known |= {path: each for path, each in found.items() if isinstance(each, Holdings)}
        return found

    async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
        """Move the folder that was examined into the trash; where it holds files of others, the version's alone."""

        def discard(root: int) -> Discarded | Gone | Refused:
            if folder.others:
                return trash.discard_files(root, path, folder.identity, folder.files)
            return trash.discard(root, path, folder.identity, folder.seal)

        self._known.pop(path, None)
        return await self._deleting(f"moving {path} away", discard)

    async def forget_manifests(self, paths: Sequence[str]) -> None:
        """Delete the manifests that the service keeps of other folders than these."""
        await self._deleting("deleting manifests", lambda root: forget_manifests(root, paths))

    async def free(self) -> int:
        return await self._look("looking how much is free", lambda root: shutil.disk_usage(root).free)

    async def is_published(self, run: str) -> bool:
        return await self._look(f"looking at run {run}", lambda root: incoming.is_published(root, run))

    async def survey(self, runs: Sequence[str]) -> list[incoming.Incoming]:
        return await self._look(
            "listing what is being written", lambda root: incoming.survey(root, runs), LISTING_SECONDS
        )

    async def discard_abandoned(self, path: str) -> Discarded | Gone | Refused:
        return await self._deleting(f"moving {path} away", lambda root: incoming.discard_abandoned(root, path))

    async def hand_back(self, discarded: Discarded, run: str) -> Slot | Refused:
        return await self._deleting("handing a slot back", lambda root: slots.hand_back(root, discarded, run))

    async def slots(self) -> list[Slot]:
        return await self._look("listing the slots", slots.survey)

    async def withdraw(self, slot: Slot) -> Discarded | Gone | Refused:
        return await self._deleting("moving a slot away", lambda root: slots.withdraw(root, slot))

    async def layout(self, path: str) -> str | None:
        return await self._look(f"looking at {path}", lambda root: slots.layout_at(root, path))

    async def empty(self) -> Emptied:
        stop = threading.Event()
        return await self._deleting("emptying the trash", lambda root: trash.empty(root, stop.is_set), stop)

    async def trash_room(self) -> tuple[int, int]:
        return await self._look("looking into the trash", trash.room)

    async def _look(self, what: str, work: Callable[[int], AnswerT], within: float = LOOK_TIMEOUT_SECONDS) -> AnswerT:
        return await self._threads.run(what, self._in_root(work), within=within)

    def _in_root(self, work: Callable[[int], AnswerT]) -> Callable[[], AnswerT]:
        """File work for a thread. It opens the root for itself: a handle shared with it could be closed under it."""

        def in_root() -> AnswerT:
            with root_at(self._root) as root:
                return work(root)

        return in_root

    async def _deleting(
        self, what: str, work: Callable[[int], AnswerT], stop: threading.Event | None = None
    ) -> AnswerT:
        """Run file work that deletes. A thread cannot be cancelled, so a cancellation asks it to stop and waits for it.

        The wait is limited where the file system hangs: what happens to that one folder was decided and written down.
        """
        task = asyncio.ensure_future(self._threads.run(what, self._in_root(work)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait({task}, timeout=LOOK_TIMEOUT_SECONDS)
            task.cancel()
            raise
