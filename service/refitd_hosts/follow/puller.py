"""Pulls a version from an upstream into the root: once, in parallel parts, through the same staging as a publisher.

    manifest    parsed, and held against the version's digest; it has to come alike twice
    here        what an earlier pull left (`take_up`): a file whose digest is right is not pulled again
    parts       of 16 MiB, several at a time
    digests     of each block as it arrives; joined they must be the file's digest in the manifest. A file that is wrong
                is pulled once more; where it is wrong again the pull fails
    commit      every file synced, the manifest last, then the rename

A break loses the parts that were under way, and a kill the files. A pull that was cancelled or lost its upstream leaves
its files for the next, until that is given up (`keep_only`); one that failed otherwise leaves nothing.

What a pull leaves on disk lies in `<root>/<run>/.incoming-v000123-<digest of the manifest>/`, its lock beside the
files. No byte in it is believed: the next pull digests each file that has its size, and pulls it again where it has
another digest than the manifest says. So nothing has to be written down or synced.
"""

import asyncio
import contextlib
import os
import stat
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from refitd_client.contract.manifest import (
    BLOCK,
    Manifest,
    ManifestFile,
    ManifestRefusedError,
    digest_of_block,
    joined,
    parse_manifest,
)
from refitd_client.contract.naming import MANIFEST_NAME, STAGING_LOCK, Order, pull_folder, pulled_into, version_id
from refitd_client.errors import RefitError
from refitd_client.files import durable
from refitd_client.files.durable import STAT_BLOCK
from refitd_client.files.plain_file import LOCK_PATIENCE, FileLock, LockHeldError, read_plain
from refitd_client.publish.run_folder import RunFolder
from refitd_client.write.version_folder import Laps, Meter, StagedShard, Staging, staged
from refitd_hosts.follow.upstream import DamagedError, FilePart, Sources, StoreError, UnreachableError, WrongError

PARTS = 4  # that are under way at a time
PATIENCE = 60.0  # seconds for which the upstream may give nothing, before a pull is given up
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds after failures of a part

AnswerT = TypeVar("AnswerT")
Sleep = Callable[[float], Awaitable[None]]
log = structlog.get_logger("refitd")


class PullRefusedError(Exception):
    """A version that is not pulled: this host has no room for it, or its folder is taken. The message is a sentence."""


async def in_thread(call: Callable[..., AnswerT], *arguments: object) -> AnswerT:
    """Run a call in a thread to its end, also if the caller is cancelled meanwhile: it works on the caller's memory."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # no task waits for it any more
        raise


async def again(ask: Callable[[], Awaitable[AnswerT]], sleep: Sleep) -> AnswerT:
    """Ask a source until there is an answer, or none for too long (`UnreachableError`)."""
    waited, tried = 0.0, 0
    while True:
        try:
            return await ask()
        except UnreachableError:
            if waited >= PATIENCE:
                raise
        pause = PAUSES[min(tried, len(PAUSES) - 1)]
        await sleep(pause)
        waited, tried = waited + pause, tried + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTotals:
    """What a pull took: bytes that arrived, by the name of their source. `resumed` are the bytes that an earlier pull
    had left here.
    """

    bytes_from: Mapping[str, int]
    resumed: int = 0

    def text(self, seconds: float, upstream: str) -> str:
        """What the log says of it. `upstream`: what is named where no byte had to come."""
        source = ", ".join(self.bytes_from) or upstream
        were_here = f"; {self.resumed} bytes were here" if self.resumed else ""
        return f"pulled {sum(self.bytes_from.values())} bytes in {seconds:.2f} s from {source}{were_here}"


class Puller:
    """Pulls versions into one root, one at a time. It holds the lock of each run's folder that it has pulled into.

    `guard` says why what is at the root's path is not the root, None where it is. It is called in a thread.
    """

    def __init__(
        self,
        root: Path,
        sources: Sources,
        sleep: Sleep = asyncio.sleep,
        guard: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._root, self._sources, self._sleep, self._guard = root, sources, sleep, guard
        self._folders: dict[str, RunFolder] = {}
        self._transfer: Transfer | None = None

    @property
    def arrived(self) -> int:
        return 0 if self._transfer is None else self._transfer.arrived

    def _folder_of(self, run: str) -> RunFolder:
        """The run's folder, locked against publishers on this host; a RefitError where a publisher holds it."""
        if run not in self._folders:
            self._folders[run] = RunFolder(self._root, run)
        return self._folders[run]

    def close(self) -> None:
        while self._folders:
            self._folders.popitem()[1].lock.release()

    async def keep_only(self, run: str, wanted: Collection[str]) -> bool:
        """Remove what earlier pulls of a run left of versions that are not wanted any more; whether nothing is left.

        What lies at the root's path and is not the root stays as it is.
        """
        if await in_thread(self._guard) is not None:
            return False
        dropped, left = await in_thread(drop_others, self._root, run, wanted)
        for version in dropped:
            log.info("what was pulled of a version is removed: it is not wanted any more", version=version)
        return not left

    async def pull(self, version: str, digest: str, sources: Sources | None = None) -> PullTotals:
        """Pull a version by its id and the digest of its manifest, as the upstream lists it, from these sources, or
        from the upstreams. When this returns, its folder is there and durable. A PullRefusedError says that it cannot
        be put here, an UpstreamError that it could not be had.
        """
        self._transfer = None
        if (fault := await in_thread(self._guard)) is not None:
            raise PullRefusedError(f"{version} is not written there: {fault}")
        sources = sources or self._sources
        data = await self._manifest(version, sources)
        manifest = _checked(data, version, digest, sources.upstream.name)
        try:
            folder = await in_thread(self._folder_of, manifest.run)
            if await in_thread(_is_here, folder.folder_of(manifest.order), data):
                return PullTotals(bytes_from={}, resumed=sum(file.size for file in manifest.files.values()))
            return await self._into(folder, manifest, version, data, sources)
        except (RefitError, OSError, LockHeldError) as error:
            raise PullRefusedError(f"{version} cannot be written to {self._root}: {error}") from error

    async def _into(
        self, folder: RunFolder, manifest: Manifest, version: str, data: bytes, sources: Sources
    ) -> PullTotals:
        sizes = {name: file.size for name, file in manifest.files.items()}
        transfer = self._transfer = Transfer(sources, version, self._sleep)
        name, meter = pull_folder(manifest.order, manifest.digest), Meter(sum(sizes.values()), None)
        context = staged(folder.path, meter, Laps(), take=partial(take_up, sizes=sizes), name=name)
        try:
            staging = await in_thread(context.__enter__)
            await transfer.run(manifest, staging)
            await in_thread(_commit, folder, staging, manifest.order, data)
        except (UnreachableError, StoreError, asyncio.CancelledError):
            await in_thread(_leave, context, None)
            raise
        except BaseException as error:
            await in_thread(_leave, context, error)
            raise
        await in_thread(_leave, context, None)
        return PullTotals(bytes_from=transfer.bytes_from, resumed=transfer.resumed)

    async def _manifest(self, version: str, sources: Sources) -> bytes:
        """The bytes of the manifest, asked for twice: its digest is of the files that it names and of nothing else in
        it, so that a damaged fingerprint or base would not be seen.
        """
        once, twice = [await again(lambda: sources.upstream.manifest(version), self._sleep) for _ in range(2)]
        if once != twice:
            name = sources.upstream.name
            raise UnreachableError(f"{name} gave two manifests of {version} that differ: the link damages them")
        return once


def _commit(folder: RunFolder, staging: Staging, order: Order, manifest: bytes) -> None:
    newest = folder.newest
    if newest is None or order > newest:
        folder.record(order, staging.path)
        folder.note_known(order)
    staging.commit(manifest, MANIFEST_NAME, folder.folder_of(order))


def _is_here(folder: Path, manifest: bytes) -> bool:
    """Whether the version has its name already. A kill between that and the journal leaves it so, and then the journal
    may say that an earlier version of the name was deleted. Its bytes are judged as those of any pull.
    """
    with contextlib.suppress(OSError):
        return read_plain(folder / MANIFEST_NAME, len(manifest) + 1) == manifest
    return False


def _checked(data: bytes, version: str, digest: str, source: str) -> Manifest:
    try:
        manifest = parse_manifest(data)
    except ManifestRefusedError as error:
        raise WrongError(f"{source} gave a manifest of {version} that is none: {error}") from error
    if version_id(manifest.run, manifest.order) != version or manifest.digest != digest:
        raise WrongError(f"{source} gave the manifest of another version than {version}, or of other contents")
    return manifest


def _leave(context: contextlib.AbstractContextManager[Staging], error: BaseException | None) -> None:
    with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
        context.__exit__(None if error is None else type(error), error, None)


@dataclass(slots=True)
class _File:
    """A file that is being pulled. `digests` has those of the blocks that arrived. `is_again`: it was wrong once.
    `is_here`: an earlier pull has left all of it.
    """

    name: str
    entry: ManifestFile
    shard: StagedShard
    digests: list[bytes | None]
    is_again: bool = False
    is_here: bool = False


@contextlib.asynccontextmanager
async def _first_error() -> AsyncGenerator[asyncio.TaskGroup]:
    """A group of tasks whose first error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Transfer:
    """The blocks of one version on their way into its staging folder. `arrived` counts bytes, `bytes_from` has them by
    the name of their source, `resumed` those that were here.
    """

    def __init__(self, sources: Sources, version: str, sleep: Sleep) -> None:
        self._sources, self._version, self._sleep = sources, version, sleep
        self.arrived = 0
        self.bytes_from: dict[str, int] = {}
        self.resumed = 0

    async def run(self, manifest: Manifest, staging: Staging) -> None:
        sizes = {name: file.size for name, file in manifest.files.items()}
        await in_thread(staging.require_space, await in_thread(lacking, staging.path, sizes))
        async with _first_error() as group:
            opening = [group.create_task(in_thread(self._opened, staging, *named)) for named in manifest.files.items()]
        files = [each.result() for each in opening]
        self.arrived = self.resumed = sum(file.entry.size for file in files if file.is_here)
        queue = deque((file, block) for file in files if not file.is_here for block in range(len(file.digests)))
        async with _first_error() as group:
            for _ in range(min(PARTS, len(queue))):
                group.create_task(self._work(queue, staging))

    def _opened(self, staging: Staging, name: str, entry: ManifestFile) -> _File:
        shard = staging.open_shard(name)
        file = _File(name, entry, shard, [None] * max(1, -(-entry.size // BLOCK)))
        if name not in staging.recycled:  # an earlier pull has not left it
            durable.resize(shard.fd, entry.size)
        else:
            blocks = [(at * BLOCK, min(BLOCK, entry.size - at * BLOCK)) for at in range(len(file.digests))]
            if joined([digest_of_block(shard.get(*block)) for block in blocks]) == entry.digest:
                staging.seal(shard, entry.size, entry.digest)
                file.is_here = True
        return file

    async def _work(self, queue: deque[tuple[_File, int]], staging: Staging) -> None:
        """Pull what is in the queue. The blocks of a complete file that is wrong come back into it."""
        spare = np.empty(0, np.uint8)
        while queue:
            file, block = queue.popleft()
            start = block * BLOCK
            length = min(BLOCK, file.entry.size - start)
            if len(spare) < length:
                spare = np.empty(length, np.uint8)
            await self._pull(file, start, spare[:length])
            self.arrived += length
            if None not in file.digests:
                queue.extendleft((file, wrong) for wrong in await self._completed(file, staging))

    async def _pull(self, file: _File, start: int, target: NDArray[np.uint8]) -> None:
        part = FilePart(version=self._version, file=file.name, start=start, length=len(target))

        async def ask() -> str:
            upstream = self._sources.upstream
            await upstream.fill(part, target.data)
            return upstream.name

        def keep() -> bytes:
            if part.length:
                file.shard.put(start, target)
            return digest_of_block(target)

        if part.length:
            source = await again(ask, self._sleep)
            self.bytes_from[source] = self.bytes_from.get(source, 0) + part.length
        file.digests[start // BLOCK] = await in_thread(keep)

    async def _completed(self, file: _File, staging: Staging) -> Sequence[int]:
        """Seal a file whose digest is right; else the blocks that are to be pulled again, once."""
        digests = [digest for digest in file.digests if digest is not None]
        if joined(digests) == file.entry.digest:
            await in_thread(staging.seal, file.shard, file.entry.size, file.entry.digest)
            return ()
        if file.is_again:
            raise DamagedError(
                f"{self._sources.upstream.name} gave wrong bytes of {file.name} of {self._version} again: its files "
                "are not those that its manifest names, or the link damages them"
            )
        file.is_again, file.digests = True, [None] * len(digests)
        return range(len(digests))


def take_up(folder: Path, sizes: Mapping[str, int]) -> FileLock | None:
    """Go on in the folder that an earlier pull left, with the files that may be of these names and sizes. Blocks.

    Returns its held lock; None where there is no such folder, or something else lies there, which is removed. Folders
    of other contents under the version's name are removed too. An OSError or LockHeldError says why it cannot be had.
    """
    for other in folder.parent.iterdir():
        if other != folder and pulled_into(other.name) == pulled_into(folder.name):
            _removed(other)
    try:
        lock = _locked(folder)
    except FileNotFoundError:
        return None
    try:
        _clear(folder, sizes)
    except BaseException as error:
        try:
            if not isinstance(error, OSError):
                raise
            durable.remove_folder(folder)
        finally:
            lock.release()
        return None
    return lock


def lacking(folder: Path, sizes: Mapping[str, int]) -> int:
    """The bytes that files of these sizes still need on the file system of the folder that they are written in."""
    there = 0
    for name, size in sizes.items():
        with suppress(OSError):
            there += min(size, (folder / name).lstat().st_blocks * STAT_BLOCK)
    return sum(sizes.values()) - there


def drop_others(root: Path, run: str, wanted: Collection[str]) -> tuple[list[str], list[str]]:
    """Remove what earlier pulls of a run left of other versions than `wanted` (ids). Blocks. Returns the ids of the
    versions of which all was removed, and of those of which something could not be removed now.
    """
    dropped: list[str] = []
    left: list[str] = []
    with suppress(FileNotFoundError):
        for folder in list((root / run).iterdir()):
            order = pulled_into(folder.name)
            if order is not None and (version := version_id(run, order)) not in wanted:
                (dropped if _removed(folder) else left).append(version)
    return dropped, left


def _locked(folder: Path) -> FileLock:
    """The lock of a folder that a pull left, held. The folder is there: one that the collector takes goes under it."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    lock = FileLock(folder / STAGING_LOCK, patience=LOCK_PATIENCE)
    try:
        folder.lstat()
    except OSError:
        lock.release()
        raise
    return lock


def _clear(folder: Path, sizes: Mapping[str, int]) -> None:
    """Remove what is no file of these names and sizes that this user alone has written. An OSError says that something
    there cannot be removed, as a folder.
    """
    device = folder.lstat().st_dev
    for name in os.listdir(folder):
        status = (folder / name).lstat()
        fits = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_dev == device
        fits = fits and status.st_size == sizes.get(name) and os.access(folder / name, os.R_OK | os.W_OK)
        if name != STAGING_LOCK and not fits:
            durable.remove_file(folder / name)


def _removed(folder: Path) -> bool:
    """Remove a folder that a pull left; whether it is gone."""
    try:
        lock = _locked(folder)
    except FileNotFoundError:
        return True
    except (OSError, LockHeldError):
        return False
    try:
        durable.remove_folder(folder)
    except OSError:
        return False
    finally:
        lock.release()
    return True
