"""The blocks of one version on their way into its staging folder, each from a relay or from the upstream.

    from whom    the upstream names a relay for each stripe of blocks; where it gives nothing, the upstream itself
    not yet      a relay that still waits for a block itself says so after a while, and is asked again
    check        each block by its digest, before it counts or is handed on to others
    wrong        the relay is named and not used again, and the block comes from the upstream
    here         what an earlier pull left, by its journal: it is digested again, and handed on if it is right

A file of one block has its digest in the manifest. The blocks' digests of larger files are asked for where relays are
in use: joined they must be the manifest's, so they are believed no more than bytes. Without relays they are asked for
only once a file's digest was wrong.

With relays the blocks of a small version are smaller than those of the manifest (`block_of`): a host hands on nothing
before it has a block, so a delta of four blocks would go through a chain of hosts four times as slowly as one of many.
Digests of such blocks are the upstream's word, asked for twice, and serve to find who gave wrong bytes. What counts is
the file's digest in the manifest, which is computed once more when the file is complete.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd.follow.arrival import Arrival
from refitd.follow.resuming import PullJournal, lacking
from refitd.follow.sources import RelaySource
from refitd.follow.tasks import first_error, in_thread
from refitd.follow.upstream import ByteSource, FilePart, NotYetError, UnreachableError, UpstreamError, WrongError
from refitd.state.observer import Notifier
from refitd_client.contract.manifest import BLOCK, Manifest, ManifestFile, digest_of_block, joined
from refitd_client.files import durable
from refitd_client.write.version_folder import StagedShard, Staging

PARTS = 4  # that are under way at a time
NOT_YET_TIMES = 5  # that a relay may say "not yet" to one block, each after some seconds
PATIENCE = 60.0  # seconds for which no source may give anything, before a pull is given up
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds after failures of a part
MOST_BLOCKS = 128  # of a version, before they become larger than `LEAST_BLOCK`
LEAST_BLOCK = 2**20  # bytes
_ONE_BLOCK = "xxh3:"
AnswerT = TypeVar("AnswerT")


class Sources(Protocol):
    """Whom to pull from. The answers may change during a pull, as when an upstream is gone and the next one is used."""

    @property
    def upstream(self) -> "ManifestSource":
        """The upstream that is followed now."""
        ...

    def checks_blocks(self, version: str) -> bool:
        """Whether each block is checked as it comes, since relays give it or it is handed on."""
        ...

    def stripes(self, version: str) -> int:
        """In how many stripes a version is pulled."""
        ...

    def relay(self, version: str, block: int) -> RelaySource | None:
        """The relay to pull a block from, counted through all files; None for the upstream."""
        ...

    def distrust(self, relay: RelaySource, why: str) -> None:
        """Use a relay no more: it gave wrong bytes."""
        ...

    def failed(self, relay: RelaySource, why: str) -> None:
        """A relay did not give a block: it is not asked again in this pull."""
        ...


class ManifestSource(ByteSource, Protocol):
    """The part of an upstream that a pull needs."""

    async def manifest(self, version: str) -> bytes: ...

    @property
    def knows_blocks(self) -> bool: ...

    async def blocks(self, version: str, file: str, size: int) -> Sequence[bytes] | None: ...


Sleep = Callable[[float], Awaitable[None]]


def block_of(sources: Sources, version: str, total: int) -> int:
    """How many bytes of a version are pulled, checked and handed on together.

    Args:
        sources: whom it is pulled from.
        version: its id.
        total: the bytes of its files.
    """
    is_handed_on = sources.checks_blocks(version) and sources.upstream.knows_blocks
    return block_for(total) if is_handed_on else BLOCK


def block_for(total: int) -> int:
    """Bytes of a block of a version that hosts hand on, whose files have `total` bytes."""
    size = LEAST_BLOCK
    while size < BLOCK and size * MOST_BLOCKS < total:
        size *= 2
    return min(size, BLOCK)


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


@dataclass(slots=True)
class _File:
    """A file that is being pulled. `digests` has those of the blocks that arrived, `came_from` their sources.

    `first` is the number of its first block in the version. `told` are the digests that its blocks should have; `asked`
    is set once they are known, or it is known that they are not.
    """

    name: str
    entry: ManifestFile
    shard: StagedShard
    first: int
    digests: list[bytes | None]
    told: Sequence[bytes] | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    came_from: dict[int, "ByteSource | RelaySource"] = field(default_factory=dict[int, "ByteSource | RelaySource"])
    retried: set[int] = field(default_factory=set[int])


class Transfer:
    """One version's transfer. `arrived` counts bytes, `bytes_from` has them by the name of their source, `resumed`
    those that were here.
    """

    def __init__(
        self,
        sources: Sources,
        version: str,
        staging: Staging,
        journal: PullJournal,
        *,
        block: int,
        sleep: Sleep,
        began: Notifier,
    ) -> None:
        """Do nothing yet.

        Args:
            sources: whom to pull from.
            version: its id.
            staging: the folder that it is written into.
            journal: knows what is in that folder already, and hears what arrives.
            block: as `block_of` says.
            sleep: waits between two attempts.
            began: notified once others may ask for what arrives.
        """
        self._began = began
        self._sources = sources
        self._version = version
        self._staging = staging
        self._journal = journal
        self._sleep = sleep
        self._block = block
        self.arrival = Arrival(version, block)
        self.arrived = 0
        self.bytes_from: dict[str, int] = {}
        self.resumed = 0

    async def run(self, manifest: Manifest) -> None:
        """Pull all files, check and sync them."""
        if self._journal.known or not self._staging.recycled:
            sizes = {name: file.size for name, file in manifest.files.items()}
            needed = await in_thread(lacking, self._staging.path, sizes)
            await in_thread(self._staging.require_space, needed)
        files: list[_File] = []
        for name, entry in manifest.files.items():
            first = files[-1].first + len(files[-1].digests) if files else 0
            files.append(await self._opened(name, entry, first))
        self.arrival.is_open = True
        self._began.notify()
        stripes = self._sources.stripes(self._version)
        queues = [deque[tuple[_File, int]]() for _ in range(stripes)]
        for file in files:
            for block in range(len(file.digests)):
                queues[(file.first + block) % stripes].append((file, block))
        async with first_error() as group:
            group.create_task(self._ask(files))
            for queue in queues:  # each stripe at its own pace: one that waits holds up no other
                for _ in range(min(-(-PARTS // stripes), len(queue))):
                    group.create_task(self._work(queue))

    async def _opened(self, name: str, entry: ManifestFile, first: int) -> _File:
        shard = await in_thread(self._open, name, entry.size)
        self.arrival.add(name, shard.fd, entry.size)
        return _File(name, entry, shard, first, [None] * max(1, -(-entry.size // self._block)))

    def _open(self, name: str, size: int) -> StagedShard:
        shard = self._staging.open_shard(name)
        if name not in self._staging.recycled:
            durable.resize(shard.fd, size)
        return shard

    async def _ask(self, files: Sequence[_File]) -> None:
        """Find out which digests the blocks should have, where that is needed before a file is complete."""
        is_needed = self._sources.checks_blocks(self._version)
        large = [file for file in files if len(file.digests) > 1 and is_needed]
        for file in files:
            if len(file.digests) == 1:
                file.told = _of_one_block(file.entry)
            if file not in large:
                file.asked.set()
        for file in large:
            file.told = await self._blocks_of(file)
            file.asked.set()

    async def _blocks_of(self, file: _File) -> Sequence[bytes] | None:
        """The digests of a file's blocks, None where the upstream cannot say."""
        upstream = self._sources.upstream
        told = await again(lambda: upstream.blocks(self._version, file.name, self._block), self._sleep)
        if told is None or self._block == BLOCK:
            return told if told is not None and joined(told) == file.entry.digest else None
        twice = await again(lambda: upstream.blocks(self._version, file.name, self._block), self._sleep)
        return told if told == twice and len(told) == len(file.digests) else None  # else the link damages them

    async def _work(self, queue: deque[tuple[_File, int]]) -> None:
        """Pull what is in a queue. Wrong blocks of a file that was complete come back into it."""
        spare = np.empty(0, np.uint8)
        while queue:
            file, block = queue.popleft()
            start = block * self._block
            length = min(self._block, file.entry.size - start)
            if not await self._resumed(file, block, length):
                if file.shard.mapped is None and len(spare) < length:
                    spare = np.empty(length, np.uint8)
                mapped = None if file.shard.mapped is None else file.shard.mapped.bytes[start : start + length]
                await self._pull(file, block, spare[:length] if mapped is None else mapped, put=mapped is None)
            self.arrived += length
            if None not in file.digests:
                queue.extendleft((file, wrong) for wrong in await self._completed(file))

    async def _resumed(self, file: _File, block: int, length: int) -> bool:
        """Whether the block is in the file from an earlier pull, by its digest, and right as far as that is known."""
        known = self._journal.known.pop((file.name, block), None)
        start = block * self._block
        if known is None or await in_thread(lambda: digest_of_block(file.shard.get(start, length))) != known:
            return False
        await file.asked.wait()
        if file.told is not None and known != file.told[block]:
            return False
        self.resumed += length
        self._take(file, block, known, self._sources.upstream)
        return True

    async def _pull(self, file: _File, block: int, target: NDArray[np.uint8], *, put: bool) -> None:
        """Pull a block until it is right, as far as its digest is known."""
        part = FilePart(version=self._version, file=file.name, start=block * self._block, length=len(target))
        while True:
            source = await self._filled(part, target, None if block in file.retried else file.first + block)
            digest = await in_thread(_kept, file, part.start, target, put)
            await file.asked.wait()
            file.came_from[block] = source
            if file.told is None or digest == file.told[block]:
                break
            self._blame(file, block, is_known=True)
        await in_thread(self._journal.add, file.name, block, digest)
        self._take(file, block, digest, source)

    def _take(self, file: _File, block: int, digest: bytes, source: "ByteSource | RelaySource") -> None:
        """A block is in its file, and right as far as its digest is known."""
        file.came_from[block], file.digests[block] = source, digest
        if file.told is not None:
            self.arrival.checked(file.name, block)

    async def _filled(
        self, part: FilePart, target: NDArray[np.uint8], number: int | None
    ) -> "ByteSource | RelaySource":
        """Fill the target from the relay for this block of the version (None: no relay), else from the upstream.

        An upstream that gives nothing may have named another relay meanwhile, so that is asked first each time.
        """
        if not part.length:
            return self._sources.upstream

        async def ask() -> ByteSource | RelaySource:
            while number is not None and (relay := self._sources.relay(self._version, number)) is not None:
                try:
                    await _patiently(relay.source, part, target.data)
                except UpstreamError as error:
                    self._sources.failed(relay, str(error))
                else:
                    return relay
            upstream = self._sources.upstream
            await upstream.fill(part, target.data)
            return upstream

        source = await again(ask, self._sleep)
        self._count(source.source if isinstance(source, RelaySource) else source, part.length)
        return source

    def _count(self, source: ByteSource, count: int) -> None:
        self.bytes_from[source.name] = self.bytes_from.get(source.name, 0) + count

    async def _completed(self, file: _File) -> Sequence[int]:
        """Seal a file whose digest is right; else the blocks that are to be pulled again."""
        digests = [digest for digest in file.digests if digest is not None]
        if await in_thread(self._digest_of, file, digests) == file.entry.digest:
            await in_thread(self._staging.seal, file.shard, file.entry.size, file.entry.digest)
            for block in range(len(digests)):
                self.arrival.checked(file.name, block)
            return ()
        file.told = await self._blocks_of(file)
        if file.told is None:  # it is not known which: all of it again
            wrong = list(range(len(digests)))
        else:
            wrong = [block for block, digest in enumerate(digests) if digest != file.told[block]]
        if not wrong:
            raise WrongError(
                f"{self._sources.upstream.name} has other bytes of {file.name} of {self._version} than those that its "
                "manifest names"
            )
        for block in wrong:
            self._blame(file, block, is_known=file.told is not None)
            file.digests[block] = None
        return wrong

    def _digest_of(self, file: _File, digests: Sequence[bytes]) -> str:
        """The digest of a complete file as a manifest has it, from those of its blocks where they are a manifest's."""
        size = file.entry.size
        if self._block == BLOCK or size <= self._block:
            return joined(digests)
        starts = range(0, size, BLOCK)
        return joined([digest_of_block(file.shard.get(start, min(BLOCK, size - start))) for start in starts])

    def _blame(self, file: _File, block: int, *, is_known: bool) -> None:
        """A block is wrong: it comes from the upstream next time. `is_known`: its source alone gave the wrong bytes.

        Raises:
            WrongError: it was pulled again already.
        """
        source = file.came_from[block]
        if block in file.retried:
            name = source.source.name if isinstance(source, RelaySource) else source.name
            raise WrongError(
                f"{name} gave wrong bytes of {file.name} of {self._version} again: its files are not those "
                "that its manifest names, or the link damages them"
            )
        if isinstance(source, RelaySource) and is_known:
            first = block * self._block
            last = min(first + self._block, file.entry.size) - 1
            self._sources.distrust(source, f"bytes {first} to {last} of {file.name} of {self._version}")
        file.retried.add(block)


async def _patiently(relay: ByteSource, part: FilePart, buffer: memoryview) -> None:
    """Ask a relay, also while it says that it does not have the part yet."""
    for _ in range(NOT_YET_TIMES - 1):
        with contextlib.suppress(NotYetError):
            return await relay.fill(part, buffer)
    return await relay.fill(part, buffer)


def _kept(file: _File, start: int, data: NDArray[np.uint8], put: bool) -> bytes:
    """Write a block into its file where it did not arrive there, and digest it."""
    if put and len(data):
        file.shard.put(start, data)
    return digest_of_block(data)


def _of_one_block(entry: ManifestFile) -> Sequence[bytes] | None:
    """The digest of a file's only block, which is the file's; None where the manifest names it in another way."""
    try:
        return [bytes.fromhex(entry.digest.removeprefix(_ONE_BLOCK))]
    except ValueError:
        return None
