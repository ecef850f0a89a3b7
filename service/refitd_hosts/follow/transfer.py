"""The blocks of one version on their way from the upstream into its staging folder.

here         what an earlier pull left, by its journal: it is digested again, and not pulled if it is right
check        a file's blocks by their digests, which joined must be the file's digest in the manifest
wrong        all of the file is pulled once more; where it is wrong again the pull fails
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd_client.contract.manifest import BLOCK, Manifest, ManifestFile, digest_of_block, joined
from refitd_client.files import durable
from refitd_client.write.version_folder import StagedShard, Staging
from refitd_hosts.follow.resuming import PullJournal, lacking
from refitd_hosts.follow.tasks import first_error, in_thread
from refitd_hosts.follow.upstream import ByteSource, DamagedError, FilePart, UnreachableError

PARTS = 4  # that are under way at a time
PATIENCE = 60.0  # seconds for which the upstream may give nothing, before a pull is given up
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds after failures of a part
AnswerT = TypeVar("AnswerT")


class Sources(Protocol):
    """Whom to pull from. It may change during a pull, as when an upstream is gone and the next one is used."""

    @property
    def upstream(self) -> "ManifestSource":
        """The upstream that is followed now."""
        ...


class ManifestSource(ByteSource, Protocol):
    """The part of an upstream that a pull needs."""

    async def manifest(self, version: str) -> bytes: ...


Sleep = Callable[[float], Awaitable[None]]


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
    """A file that is being pulled. `digests` has those of the blocks that arrived. `is_again`: it was wrong once."""

    name: str
    entry: ManifestFile
    shard: StagedShard
    digests: list[bytes | None]
    is_again: bool = False


class Transfer:
    """One version's transfer. `arrived` counts bytes, `bytes_from` has them by the name of their source, `resumed`
    those that were here.
    """

    def __init__(self, sources: Sources, version: str, staging: Staging, journal: PullJournal, *, sleep: Sleep) -> None:
        """Do nothing yet.

        Args:
            sources: whom to pull from.
            version: its id.
            staging: the folder that it is written into.
            journal: knows what is in that folder already, and hears what arrives.
            sleep: waits between two attempts.
        """
        self._sources = sources
        self._version = version
        self._staging = staging
        self._journal = journal
        self._sleep = sleep
        self.arrived = 0
        self.bytes_from: dict[str, int] = {}
        self.resumed = 0

    async def run(self, manifest: Manifest) -> None:
        """Pull all files, check and sync them."""
        if self._journal.known or not self._staging.recycled:
            sizes = {name: file.size for name, file in manifest.files.items()}
            needed = await in_thread(lacking, self._staging.path, sizes)
            await in_thread(self._staging.require_space, needed)
        files = [await in_thread(self._opened, name, entry) for name, entry in manifest.files.items()]
        queue = deque((file, block) for file in files for block in range(len(file.digests)))
        async with first_error() as group:
            for _ in range(min(PARTS, len(queue))):
                group.create_task(self._work(queue))

    def _opened(self, name: str, entry: ManifestFile) -> _File:
        shard = self._staging.open_shard(name)
        if name not in self._staging.recycled:
            durable.resize(shard.fd, entry.size)
        return _File(name, entry, shard, [None] * max(1, -(-entry.size // BLOCK)))

    async def _work(self, queue: deque[tuple[_File, int]]) -> None:
        """Pull what is in the queue. The blocks of a complete file that is wrong come back into it."""
        spare = np.empty(0, np.uint8)
        while queue:
            file, block = queue.popleft()
            start = block * BLOCK
            length = min(BLOCK, file.entry.size - start)
            if not await self._resumed(file, block, length):
                if file.shard.mapped is None and len(spare) < length:
                    spare = np.empty(length, np.uint8)
                mapped = None if file.shard.mapped is None else file.shard.mapped.bytes[start : start + length]
                await self._pull(file, block, spare[:length] if mapped is None else mapped, put=mapped is None)
            self.arrived += length
            if None not in file.digests:
                queue.extendleft((file, wrong) for wrong in await self._completed(file))

    async def _resumed(self, file: _File, block: int, length: int) -> bool:
        """Whether the block is in the file from an earlier pull, by its digest."""
        known = self._journal.known.pop((file.name, block), None)
        start = block * BLOCK
        if known is None or await in_thread(lambda: digest_of_block(file.shard.get(start, length))) != known:
            return False
        self.resumed += length
        file.digests[block] = known
        return True

    async def _pull(self, file: _File, block: int, target: NDArray[np.uint8], *, put: bool) -> None:
        part = FilePart(version=self._version, file=file.name, start=block * BLOCK, length=len(target))

        async def ask() -> str:
            upstream = self._sources.upstream
            await upstream.fill(part, target.data)
            return upstream.name

        if part.length:
            source = await again(ask, self._sleep)
            self.bytes_from[source] = self.bytes_from.get(source, 0) + part.length
        digest = await in_thread(_kept, file, part.start, target, put)
        await in_thread(self._journal.add, file.name, block, digest)
        file.digests[block] = digest

    async def _completed(self, file: _File) -> Sequence[int]:
        """Seal a file whose digest is right; else the blocks that are to be pulled again.

        Raises:
            DamagedError: it was pulled again already.
        """
        digests = [digest for digest in file.digests if digest is not None]
        if joined(digests) == file.entry.digest:
            await in_thread(self._staging.seal, file.shard, file.entry.size, file.entry.digest)
            return ()
        if file.is_again:
            raise DamagedError(
                f"{self._sources.upstream.name} gave wrong bytes of {file.name} of {self._version} again: its files "
                "are not those that its manifest names, or the link damages them"
            )
        file.is_again, file.digests = True, [None] * len(digests)
        return range(len(digests))


def _kept(file: _File, start: int, data: NDArray[np.uint8], put: bool) -> bytes:
    """Write a block into its file where it did not arrive there, and digest it."""
    if put and len(data):
        file.shard.put(start, data)
    return digest_of_block(data)
