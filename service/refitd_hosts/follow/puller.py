"""Pulls a version from an upstream into the root: once, in parallel parts, through the same staging as a publisher.

    manifest    parsed, and held against the version's digest; it has to come alike twice
    slot        the files of a collected version of the same layout, if the recycler has left one
    parts       of 16 MiB, several at a time (`transfer.py`)
    digests     of each block as it arrives; joined they must be the file's digest in the manifest
    commit      every file synced, the manifest last, then the rename
    resume      what a kill or a lost upstream left is gone on with (`resuming.py`)

A break loses the parts that were under way, and so does a kill. A pull that was cancelled or lost its upstream leaves
its parts for the next, until that is given up (`keep_only`); one that failed otherwise leaves nothing.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from refitd_client.checkpoint.header import MAX_HEADER_BYTES
from refitd_client.contract.manifest import Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order, ShardLayout, slots_path, version_id
from refitd_client.errors import RefitError
from refitd_client.files.durable import Mappings
from refitd_client.files.plain_file import read_plain
from refitd_client.publish.run_folder import RunFolder
from refitd_client.write.version_folder import Laps, Meter, Staging, staged
from refitd_hosts.follow.resuming import PullJournal, drop_others
from refitd_hosts.follow.tasks import in_thread
from refitd_hosts.follow.transfer import Sources, Transfer, again
from refitd_hosts.follow.upstream import FilePart, StoreError, UnreachableError, WrongError

_SHARD = ".safetensors"
_HEAD = 2**18  # bytes of a shard in which most headers lie

log = structlog.get_logger("refitd")


class PullRefusedError(Exception):
    """A version that is not pulled: this host has no room for it, or its folder is taken. The message is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTotals:
    """What a pull took: bytes that arrived, by the name of their source, and milliseconds by stage. `resumed` are the
    bytes that an earlier pull had left here.
    """

    version: str
    bytes_from: Mapping[str, int]
    timings: Mapping[str, float]
    resumed: int = 0

    def text(self, seconds: float, upstream: str) -> str:
        """What the log says of it. `upstream`: what is named where no byte had to come."""
        source = ", ".join(self.bytes_from) or upstream
        were_here = f"; {self.resumed} bytes were here" if self.resumed else ""
        return f"pulled {sum(self.bytes_from.values())} bytes in {seconds:.2f} s from {source}{were_here}"


class Puller:
    """Pulls versions into one root, one at a time. It holds the lock of each run's folder that it has pulled into."""

    def __init__(
        self,
        root: Path,
        sources: Sources,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        guard: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Do nothing yet.

        Args:
            root: what is pulled into.
            sources: from where.
            sleep: waits so many seconds.
            guard: says why what is at the root's path is not the root, None where it is. Called in a thread.
        """
        self._root = root
        self._sources = sources
        self._sleep = sleep
        self._guard = guard
        self._folders: dict[str, RunFolder] = {}
        self._mappings = Mappings()
        self._transfer: Transfer | None = None

    @property
    def arrived(self) -> int:
        """Bytes that have arrived of the version that is being pulled."""
        return 0 if self._transfer is None else self._transfer.arrived

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
        """Pull a version; when this returns, its folder is there and durable.

        Args:
            version: its id.
            digest: of its manifest, as the upstream lists it.
            sources: from where this one is pulled; None for the upstreams.

        Raises:
            PullRefusedError: it cannot be put here.
            UpstreamError: it could not be had.
        """
        self._transfer = None
        if (fault := await in_thread(self._guard)) is not None:
            raise PullRefusedError(f"{version} is not written there: {fault}")
        laps, sources = Laps(), sources or self._sources
        data = await self._manifest(version, sources)
        manifest = _checked(data, version, digest, sources.upstream.name)
        try:
            folder = await in_thread(self.folder_of, manifest.run)
            if await in_thread(_is_here, folder.folder_of(manifest.order), data):
                there = sum(file.size for file in manifest.files.values())
                return PullTotals(version=version, bytes_from={}, timings={}, resumed=there)
            with laps.lap("layout"):
                layout = await self._layout(manifest, version, sources)
            return await self._into(folder, manifest, version, data, layout, laps, sources)
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
        sources: Sources,
    ) -> PullTotals:
        total = sum(file.size for file in manifest.files.values())
        journal = PullJournal(self._root, manifest)
        take = partial(journal.take, folder, layout)
        context = staged(folder.path, Meter(total, None), laps, take=take, mappings=self._mappings)
        try:
            staging = await in_thread(context.__enter__)
            transfer = self._transfer = Transfer(sources, version, staging, journal, sleep=self._sleep)
            with laps.lap("pull"):
                await transfer.run(manifest)
            with laps.lap("commit"):
                await in_thread(self._commit, folder, staging, manifest.order, data)
        except (UnreachableError, StoreError, asyncio.CancelledError):
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
        return PullTotals(
            version=version,
            bytes_from=transfer.bytes_from,
            timings=dict(laps.times),
            resumed=transfer.resumed,
        )

    async def _manifest(self, version: str, sources: Sources) -> bytes:
        """The bytes of the manifest, asked for twice: its digest is of the files that it names and of nothing else in
        it, so that a damaged fingerprint or base would not be seen.

        Raises:
            UnreachableError: they differ.
        """
        once, twice = [await again(lambda: sources.upstream.manifest(version), self._sleep) for _ in range(2)]
        if once != twice:
            name = sources.upstream.name
            raise UnreachableError(f"{name} gave two manifests of {version} that differ: the link damages them")
        return once

    def _commit(self, folder: RunFolder, staging: Staging, order: Order, manifest: bytes) -> None:
        newest = folder.newest
        if newest is None or order > newest:
            folder.record(order, staging.path)
            folder.note_known(order)
        staging.commit(manifest, MANIFEST_NAME, folder.folder_of(order))

    async def _layout(self, manifest: Manifest, version: str, sources: Sources) -> Sequence[ShardLayout]:
        """The layout of the version's shards, by their headers; none where there is no slot that it could fit."""
        shards = {name: file for name, file in manifest.files.items() if name.endswith(_SHARD)}
        if not shards or not await in_thread(_has_entries, self._root / slots_path(manifest.run)):
            return ()
        return [
            ShardLayout(name=name, header=await self._header(version, name, file.size, sources), size=file.size)
            for name, file in shards.items()
        ]

    async def _header(self, version: str, name: str, size: int, sources: Sources) -> bytes:
        head = await self._bytes(version, name, min(size, _HEAD), sources)
        length = 8 + min(int.from_bytes(head[:8], "little"), MAX_HEADER_BYTES)
        if len(head) < length <= size:
            head = await self._bytes(version, name, length, sources)
        return head[:length]

    async def _bytes(self, version: str, name: str, length: int, sources: Sources) -> bytes:
        buffer = bytearray(length)
        part = FilePart(version=version, file=name, start=0, length=length)
        await again(lambda: sources.upstream.fill(part, memoryview(buffer)), self._sleep)
        return bytes(buffer)


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


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _leave(context: contextlib.AbstractContextManager[Staging], error: BaseException | None) -> None:
    with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
        context.__exit__(None if error is None else type(error), error, None)
