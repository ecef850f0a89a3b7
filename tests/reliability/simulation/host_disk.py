"""A follower's root: real files in a file system in memory, which the product's own code writes, moves and recycles.

What lies there is read once, held against what was published byte by byte, and is from then on what the made-up servers
and the made-up catalog know versions by.
"""

import asyncio
import errno
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from refitd.policy.holdings import Holdings
from refitd.reclaim.folders import DiskFolders
from refitd.root.handle import RootThreads
from refitd.root.ownership import RootGuard, mark_root
from refitd.root.scan import Discarded, Emptied, Gone, Listing, ListingFailed, Refused, Slot
from refitd.state.store import Store
from refitd_client.contract.manifest import Manifest, parse_manifest
from refitd_client.contract.naming import INCOMING_PREFIX, MANIFEST_NAME, ROOT_NAME, SERVICE_FOLDER, TRASH, pulled_into

from .disk import Make, Pause, SimDisk, SimFolder, bytes_of, seen_at

AnswerT = TypeVar("AnswerT")
RUN = "run"
_HALF = itertools.count(-1_000_000, -1)  # what is being written into a slot: no version has such contents
LONG_AGO = 10**6  # seconds since 1970


class Published:
    """What trainers have published with a manifest, by version and digest."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[SimFolder, bytes]] = {}

    def note(self, path: str, manifest: Manifest, folder: SimFolder) -> None:
        self._known[path, manifest.digest] = replace(folder), manifest.to_json()

    def at(self, path: str, digest: str) -> tuple[SimFolder, bytes] | None:
        """What a version of that name and digest holds, and its manifest; None where none was ever published."""
        return self._known.get((path, digest))


class HostDisk(SimDisk):
    """The root of a follower. Its `folders` are what lies there as versions."""

    def __init__(self, parent: Path, published: Published) -> None:
        super().__init__()
        self._parent = parent
        self._published = published
        self._by_inode: dict[int, SimFolder] = {}
        self._times = itertools.count()
        self.kind = "tmpfs"  # of the file system
        self.guard: Callable[[], str | None] = lambda: None
        self.root = self._new()

    def _next(self) -> Path:
        return self._parent / f"root-{next(self._times)}"

    def _new(self) -> Path:
        root = self._next()
        (root / SERVICE_FOLDER).mkdir(parents=True)
        return root

    def guard_for(self, store: Store) -> Callable[[], str | None]:
        """What says whether the root is the one that a journal is about, as the product finds out at each start."""
        mounts = f"made-up {self._parent} {self.kind} rw 0 0"
        mark = mark_root(self.root, store.origin.root, has_versions=bool(store.versions), mounts=mounts)
        store.is_about(mark)
        self.guard = RootGuard(self.root, mark)
        return self.guard

    def exchange(self, *, service: str | None, contents: Mapping[str, int], kind: str = "tmpfs") -> Path:
        """While no process runs another root comes into the place of this one: an empty one, or a `service`'s, with
        other contents under names of versions. Return the root that was there.
        """
        old, self.root, self.kind = self.root, self._new(), kind
        if service is not None:
            (self.root / SERVICE_FOLDER / ROOT_NAME).write_text(f"{service}\n")
        for path, content in contents.items():
            folder = SimFolder(0, Make.GOOD, content)
            manifest = seen_at(path, folder).structure.manifest
            assert manifest is not None
            (self.root / path).mkdir(parents=True)
            for name in manifest.files:
                (self.root / path / name).write_bytes(bytes_of(Make.GOOD, name, content))
            (self.root / path / MANIFEST_NAME).write_bytes(manifest.to_json())
            self._published.note(path, manifest, folder)
        return old

    def everything(self) -> dict[str, bytes]:
        files = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}

    def process_ends(self) -> None:
        """The process is killed: nothing that it does from now on, on its way out, changes anything.

        So the root gets another name. What the process has left half written is as old as it will be when that counts.
        """
        root = self._next()
        self.root.rename(root)
        self.root = root
        for folder in self.being_written():
            self.counts["killed in a pull"] += 1
            for path in (*folder.iterdir(), folder):
                os.utime(path, (LONG_AGO, LONG_AGO))

    def being_written(self) -> list[Path]:
        """Folders of versions that are being written, or were when their writer was killed."""
        return sorted((self.root / RUN).glob(f"{INCOMING_PREFIX}*"))

    def left_behind(self) -> list[str]:
        trash = self.root / SERVICE_FOLDER / TRASH
        discarded = sorted(trash.iterdir()) if trash.is_dir() else []
        return [str(path.relative_to(self.root)) for path in (*self.being_written(), *discarded)]

    def being_pulled(self) -> set[str]:
        """The folders of unfinished pulls."""
        return {f"{RUN}/{each.name}" for each in self.being_written() if pulled_into(each.name) is not None}

    def at(self, path: str) -> SimFolder:
        if (fault := self.guard()) is not None:
            raise OSError(errno.ENODEV, fault)
        self._look()
        return super().at(path)

    def any(self, path: str) -> SimFolder | None:
        self._look()
        return super().any(path)

    def listing(self) -> Listing | ListingFailed:
        if (fault := self.guard()) is not None:
            return ListingFailed(fault)
        self._look()
        return super().listing()

    def _look(self) -> None:
        """See what lies in the run's folder now."""
        found: dict[str, int] = {}
        try:
            with os.scandir(self.root / RUN) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        found[f"{RUN}/{entry.name}"] = entry.inode()
        except FileNotFoundError:
            pass
        for path in [path for path in self.folders if path not in found]:
            del self.folders[path]
        for path, inode in sorted(found.items()):
            known = self.folders.get(path)
            if known is None or known.inode != inode:
                self.folders[path] = self._read(path, inode)

    def _read(self, path: str, inode: int) -> SimFolder:
        """A version that was not there before: it is exactly what was published under its name, or nothing is right."""
        folder = self.root / path
        data = (folder / MANIFEST_NAME).read_bytes()
        manifest = parse_manifest(data)
        known = self._published.at(path, manifest.digest)
        assert known is not None, f"2: {path} counts as a version on a host, and was never published"
        published, told = known
        assert data == told, f"2: the manifest of {path} on a host has not the bytes that were published"
        make, content = published.make, published.content
        there = {each.name for each in folder.iterdir()} - {MANIFEST_NAME}
        assert there == set(manifest.files), f"2: {path} on a host has {sorted(there)}"
        for name in there:
            is_right = (folder / name).read_bytes() == bytes_of(make, name, content)
            assert is_right, f"2: {name} of {path} on a host has not the bytes that were published"
        self.counts["pulled"] += 1
        seen = self._by_inode.setdefault(inode, SimFolder(inode, make, content))
        seen.make, seen.content, seen.writes = make, content, seen.writes + 1
        seen.base, seen.onto = published.base, published.onto
        return seen

    def becomes_slot(self, folder: SimFolder) -> None:
        """What is written into its files next may be the same version again, before the next look."""
        for path in [path for path, known in self.folders.items() if known is folder]:
            del self.folders[path]
        folder.content = next(_HALF)


class _NoThreads(RootThreads):
    """Calls on the root, when it is their turn in virtual time."""

    async def run(self, what: str, call: Callable[[], AnswerT], *, within: float | None = None) -> AnswerT:
        del what, within
        return await asyncio.get_running_loop().run_in_executor(None, call)


class HostFolders(DiskFolders):
    """The sweep's port, the product's own. `discarded` and `recycled` hear of each folder before."""

    def __init__(
        self,
        disk: HostDisk,
        pause: Pause,
        discarded: Callable[[str, SimFolder], None],
        recycled: Callable[[SimFolder], None],
    ) -> None:
        super().__init__(disk.root, _NoThreads())
        self._disk = disk
        self._pause = pause
        self._discarded = discarded
        self._recycled = recycled
        self._thrown: dict[str, SimFolder] = {}
        self._looked: Callable[[], None] = lambda: None

    async def _deleting(self, what, work, stop=None):  # noqa: ANN001, ANN202
        await self._pause()
        if self._disk.fault is not None or self._disk.hidden:
            raise OSError(errno.EIO, "Input/output error")
        looked, self._looked = self._looked, lambda: None

        def act(root: int) -> Any:
            looked()
            return work(root)

        return await super()._deleting(what, act, stop)

    async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
        known = self._disk.any(path)
        if known is not None:
            self._looked = lambda: self._discarded(path, known)
        done = await super().discard(path, folder)
        if known is not None and isinstance(done, Discarded):
            self._thrown[done.where] = known
        return done

    async def hand_back(self, discarded: Discarded, run: str) -> Slot | Refused:
        known = self._thrown.pop(discarded.where, None)
        if known is not None:
            self._looked = lambda: self._is_offered(known)
        return await super().hand_back(discarded, run)

    def _is_offered(self, folder: SimFolder) -> None:
        self._recycled(folder)
        self._disk.becomes_slot(folder)

    async def empty(self) -> Emptied:
        self._thrown.clear()
        return await super().empty()
