"""Pulls a version from an upstream into the root: once, in parallel parts, through the same staging as a publisher.

    manifest    parsed, and held against the version's digest
    slot        the files of a collected version of the same layout, if the recycler has left one
    parts       of 16 MiB, several at a time, each from a relay or from the upstream; one that fails is asked for again
    digests     of each block as it arrives; joined they must be the file's digest in the manifest
    commit      every file synced, the manifest last, then the rename
    resume      what a kill or a lost upstream left is gone on with (`resuming.py`)

A file whose digest is wrong is looked at again by the digests of its blocks, which the upstream tells: the blocks that
are wrong are pulled from the upstream itself, and the relay that gave them is named and not used again.

A break loses the parts that were under way, and so does a kill. A pull that was cancelled or lost its upstream leaves
its parts for the next, until that is given up (`keep_only`); one that failed otherwise leaves nothing.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from refitd.follow.resuming import PullJournal, drop_others, lacking
from refitd.follow.tasks import first_error, in_thread
from refitd.follow.upstream import ByteSource, FilePart, UnreachableError, UpstreamError, WrongError
from refitd_client.checkpoint.strict_header import MAX_HEADER_BYTES
from refitd_client.contract.manifest import (
    BLOCK,
    Manifest,
    ManifestFile,
    ManifestRefusedError,
    digest_of_block,
    joined,
    parse_manifest,
)
from refitd_client.contract.naming import MANIFEST_NAME, Order, ShardLayout, slots_path, version_id
from refitd_client.errors import RefitError
from refitd_client.files import durable
from refitd_client.files.durable import Mappings
from refitd_client.publish.run_folder import RunFolder
from refitd_client.write.version_folder import Laps, Meter, StagedShard, Staging, staged

PARTS = 4  # that are under way at a time
PATIENCE = 60.0  # seconds for which no source may give anything, before a pull is given up
_PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds after failures of a part
_SHARD = ".safetensors"
_HEAD = 2**18  # bytes of a shard in which most headers lie

log = structlog.get_logger("refitd")
AnswerT = TypeVar("AnswerT")


class PullRefusedError(Exception):
    """A version that is not pulled: this host has no room for it, or its folder is taken. The message is a sentence."""


class Sources(Protocol):
    """Whom to pull from. The answers may change during a pull, as when an upstream is gone and the next one is used."""

    @property
    def upstream(self) -> "ManifestSource":
        """The upstream that is followed now."""
        ...

    def relays(self, version: str) -> Sequence[ByteSource]:
        """Followers to pull a version's bytes from, before the upstream."""
        ...

    def distrust(self, relay: str, why: str) -> None:
        """Use a relay no more: it gave wrong bytes."""
        ...

    def failed(self, version: str, relay: str) -> None:
        """A relay did not give a part of a version: it is not asked for that version again, unless it is named anew."""
        ...


class ManifestSource(ByteSource, Protocol):
    """The part of an upstream that a pull needs."""

    async def manifest(self, version: str) -> bytes: ...

    async def blocks(self, version: str, file: str) -> Sequence[bytes] | None: ...


@dataclass(frozen=True, slots=True)
class PullTotals:
    """What a pull took: bytes that arrived, by the name of their source, and milliseconds by stage. `resumed` are the
    bytes that an earlier pull had left here.
    """

    version: str
    bytes_from: Mapping[str, int]
    timings: Mapping[str, float]
    resumed: int = 0


@dataclass(slots=True)
class _File:
    """A file that is being pulled. `digests` has those of the blocks that arrived, `came_from` their sources."""

    name: str
    entry: ManifestFile
    shard: StagedShard
    digests: list[bytes | None]
    came_from: dict[int, ByteSource] = field(default_factory=dict[int, ByteSource])
    is_complete: bool = False


class Puller:
    """Pulls versions into one root, one at a time. It holds the lock of each run's folder that it has pulled into."""

    def __init__(self, root: Path, sources: Sources, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Do nothing yet."""
        self._root = root
        self._sources = sources
        self._sleep = sleep
        self._folders: dict[str, RunFolder] = {}
        self._mappings = Mappings()
        self.arrived = 0  # bytes of the version that is being pulled

    def folder_of(self, run: str) -> RunFolder:
        """The run's folder, locked against publishers on this host. Blocks; call it in a thread.

        Raises:
            RefitError: a publisher holds it, or it cannot be made.
        """
        if run not in self._folders:
            self._folders[run] = RunFolder(self._root, run)
        return self._folders[run]

    def close(self) -> None:
        """Release the runs' folders."""
        while self._folders:
            self._folders.popitem()[1].lock.release()
        self._mappings.close()

    async def keep_only(self, run: str, wanted: Collection[str]) -> None:
        """Remove what earlier pulls of a run left of versions that are not wanted any more."""
        for version in await in_thread(drop_others, self._root, run, wanted):
            log.info("what was pulled of a version is removed: it is not wanted any more", version=version)

    async def pull(self, version: str, digest: str) -> PullTotals:
        """Pull a version; when this returns, its folder is there and durable.

        Args:
            version: its id.
            digest: of its manifest, as the upstream lists it.

        Raises:
            PullRefusedError: it cannot be put here.
            UpstreamError: it could not be had.
        """
        self.arrived = 0
        laps = Laps()
        data = await self.again(lambda: self._sources.upstream.manifest(version))
        manifest = _checked(data, version, digest, self._sources.upstream.name)
        try:
            folder = await in_thread(self.folder_of, manifest.run)
            with laps.lap("layout"):
                layout = await self._layout(manifest, version)
            return await self._into(folder, manifest, version, data, layout, laps)
        except (RefitError, OSError) as error:
            raise PullRefusedError(f"{version} cannot be written to {self._root}: {error}") from error

    async def _into(
        self,
        folder: RunFolder,
        manifest: Manifest,
        version: str,
        data: bytes,
        layout: Sequence[ShardLayout],
        laps: Laps,
    ) -> PullTotals:
        total = sum(file.size for file in manifest.files.values())
        journal = PullJournal(self._root, manifest)
        take = partial(journal.take, folder, layout)
        context = staged(folder.path, Meter(total, None), laps, take=take, mappings=self._mappings)
        try:
            staging = await in_thread(context.__enter__)
            transfer = _Transfer(self, self._sources, version, staging, journal)
            with laps.lap("pull"):
                await transfer.run(manifest)
            with laps.lap("commit"):
                await in_thread(self._commit, folder, staging, manifest.order, data)
        except (UnreachableError, asyncio.CancelledError):
            await in_thread(_leave, context, None)
            journal.close()
            raise
        except BaseException as error:
            await in_thread(_leave, context, error)
            await in_thread(journal.remove)
            raise
        await in_thread(_leave, context, None)
        await in_thread(journal.remove)
        await in_thread(self._mappings.prune)
        return PullTotals(version, transfer.bytes_from, dict(laps.times), transfer.resumed)

    def _commit(self, folder: RunFolder, staging: Staging, order: Order, manifest: bytes) -> None:
        newest = folder.newest
        if newest is None or order > newest:
            folder.record(order, staging.path)
            folder.note_known(order)
        staging.commit(manifest, MANIFEST_NAME, folder.folder_of(order))

    async def _layout(self, manifest: Manifest, version: str) -> Sequence[ShardLayout]:
        """The layout of the version's shards, by their headers; none where there is no slot that it could fit."""
        shards = {name: file for name, file in manifest.files.items() if name.endswith(_SHARD)}
        if not shards or not await in_thread(_has_entries, self._root / slots_path(manifest.run)):
            return ()
        return [
            ShardLayout(name=name, header=await self._header(version, name, file.size), size=file.size)
            for name, file in shards.items()
        ]

    async def _header(self, version: str, name: str, size: int) -> bytes:
        head = await self._bytes(version, name, min(size, _HEAD))
        length = 8 + min(int.from_bytes(head[:8], "little"), MAX_HEADER_BYTES)
        if len(head) < length <= size:
            head = await self._bytes(version, name, length)
        return head[:length]

    async def _bytes(self, version: str, name: str, length: int) -> bytes:
        buffer = bytearray(length)
        part = FilePart(version=version, file=name, start=0, length=length)
        await self.again(lambda: self._sources.upstream.fill(part, memoryview(buffer)))
        return bytes(buffer)

    async def again(self, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Ask a source until there is an answer, or none for too long."""
        waited, tried = 0.0, 0
        while True:
            try:
                return await ask()
            except UnreachableError:
                if waited >= PATIENCE:
                    raise
            pause = _PAUSES[min(tried, len(_PAUSES) - 1)]
            await self._sleep(pause)
            waited, tried = waited + pause, tried + 1


class _Transfer:
    """The parts of one version on their way into its staging folder."""

    def __init__(self, puller: Puller, sources: Sources, version: str, staging: Staging, journal: PullJournal) -> None:
        self._puller = puller
        self._sources = sources
        self._version = version
        self._staging = staging
        self._journal = journal
        self._triedagain_: set[tuple[str, int]] = set()
        self.bytes_from: dict[str, int] = {}
        self.resumed = 0

    async def run(self, manifest: Manifest) -> None:
        """Pull all files, check and sync them."""
        if self._journal.known or not self._staging.recycled:
            sizes = {name: file.size for name, file in manifest.files.items()}
            needed = await in_thread(lacking, self._staging.path, sizes)
            await in_thread(self._staging.require_space, needed)
        files = [await self._begun(name, entry) for name, entry in manifest.files.items()]
        todo = deque((file, block) for file in files for block in range(len(file.digests)))
        async with first_error() as group:
            for _ in range(max(1, min(PARTS, len(todo)))):
                group.create_task(self._work(todo))

    async def _begun(self, name: str, entry: ManifestFile) -> _File:
        shard = await in_thread(self._open, name, entry.size)
        return _File(name=name, entry=entry, shard=shard, digests=[None] * max(1, -(-entry.size // BLOCK)))

    def _open(self, name: str, size: int) -> StagedShard:
        shard = self._staging.open_shard(name)
        if name not in self._staging.recycled:
            durable.resize(shard.fd, size)
        return shard

    async def _work(self, todo: deque[tuple[_File, int]]) -> None:
        spare = np.empty(0, np.uint8)
        while todo:
            file, block = todo.popleft()
            start = block * BLOCK
            length = min(BLOCK, file.entry.size - start)
            if await self._resumed(file, block, length):
                todo.extendleft((file, wrong) for wrong in await self._complete(file))
                continue
            if file.shard.mapped is None and len(spare) < length:
                spare = np.empty(length, np.uint8)
            mapped = None if file.shard.mapped is None else file.shard.mapped.bytes[start : start + length]
            target = spare[:length] if mapped is None else mapped
            part = FilePart(version=self._version, file=file.name, start=start, length=length)
            file.came_from[block] = await self._filled(part, target)
            file.digests[block] = await in_thread(self._kept, file, start, target, mapped is None)
            self._puller.arrived += length
            todo.extendleft((file, wrong) for wrong in await self._complete(file))

    async def _resumed(self, file: _File, block: int, length: int) -> bool:
        """Whether the block is in the file from an earlier pull, by its digest."""
        known = self._journal.known.pop((file.name, block), None)
        start = block * BLOCK
        if known is None or await in_thread(lambda: digest_of_block(file.shard.get(start, length))) != known:
            return False
        file.came_from[block], file.digests[block] = self._sources.upstream, known
        self.resumed += length
        self._puller.arrived += length
        return True

    def _kept(self, file: _File, start: int, data: NDArray[np.uint8], put: bool) -> bytes:
        """Write a block into its file where it did not arrive there, and digest it."""
        if put and len(data):
            file.shard.put(start, data)
        digest = digest_of_block(data)
        self._journal.add(file.name, start // BLOCK, digest)
        return digest

    async def _filled(self, part: FilePart, target: NDArray[np.uint8]) -> ByteSource:
        """Fill the target from a relay, else from the upstream; return what gave the bytes."""
        if not part.length:
            return self._sources.upstream
        again = (part.file, part.start // BLOCK) in self._triedagain_
        relays = () if again else self._sources.relays(self._version)
        for relay in relays:
            try:
                await relay.fill(part, target.data)
            except UpstreamError as error:
                log.info("a relay did not give a part", relay=relay.name, version=self._version, reason=str(error))
                self._sources.failed(self._version, relay.name)
            else:
                return self._count(relay, part.length)

        async def ask() -> ByteSource:
            upstream = self._sources.upstream
            await upstream.fill(part, target.data)
            return upstream

        return self._count(await self._puller.again(ask), part.length)

    def _count(self, source: ByteSource, count: int) -> ByteSource:
        self.bytes_from[source.name] = self.bytes_from.get(source.name, 0) + count
        return source

    async def _complete(self, file: _File) -> Sequence[int]:
        """Seal a file whose blocks are all there and right; the blocks that are to be pulled again."""
        if file.is_complete or None in file.digests:
            return ()
        file.is_complete = True
        digests = [digest for digest in file.digests if digest is not None]
        if joined(digests) == file.entry.digest:
            await in_thread(self._staging.seal, file.shard, file.entry.size, file.entry.digest)
            return ()
        upstream = self._sources.upstream
        told = await self._puller.again(lambda: upstream.blocks(self._version, file.name))
        if told is None or len(told) != len(digests) or joined(told) != file.entry.digest:
            told, wrong = None, list(range(len(digests)))  # it is not known which: all of it again
        else:
            wrong = [block for block, digest in enumerate(digests) if digest != told[block]]
        is_known = told is not None or len(digests) == 1  # whose bytes were wrong
        for block in wrong:
            source = file.came_from[block]
            if (file.name, block) in self._triedagain_:
                raise WrongError(
                    f"{source.name} gave wrong bytes of {file.name} of {self._version} again: its files are not those "
                    "that its manifest names, or the link damages them"
                )
            if source is not upstream and is_known:
                self._sources.distrust(source.name, f"it gave wrong bytes of {file.name} of {self._version}")
            self._triedagain_.add((file.name, block))
            file.digests[block] = None
        file.is_complete = False
        return wrong


def _checked(data: bytes, version: str, digest: str, source: str) -> Manifest:
    try:
        manifest = parse_manifest(data)
    except ManifestRefusedError as error:
        raise WrongError(f"{source} gave a manifest of {version} that is none: {error}") from error
    if version_id(manifest.run, manifest.order) != version or manifest.digest != digest:
        raise WrongError(f"{source} gave the manifest of another version than {version}, or of other contents")
    return manifest


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _leave(context: contextlib.AbstractContextManager[Staging], error: BaseException | None) -> None:
    with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
        context.__exit__(None if error is None else type(error), error, None)
