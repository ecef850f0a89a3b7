"""The files under the root, as the catalog looks at them. Paths are relative to the root."""

import errno
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from refitd.root.handle import LISTING_SECONDS, LOOK_TIMEOUT_SECONDS, RootHangsError, RootThreads
from refitd.root.ownership import RootGuard
from refitd.root.scan import Listing, ListingFailed, scan
from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import OpeningRefusedError
from refitd_client.contract.manifest import Manifest
from refitd_client.validation.base import Base
from refitd_client.validation.examine import ReadAgain, examine, glance, read_again, signature, structure
from refitd_client.validation.foreign import Trainer, keep_manifest, sign_manifest
from refitd_client.validation.validate import Evidence, Options, Structure


@dataclass(frozen=True, slots=True)
class Unreadable:
    """It is not known what is there now; this is no reason to believe that it has changed."""

    reason: str


class RootAwayError(OSError):
    """What lies at the root's path is not the root; the text says why and what to do."""


class DiskFiles:
    """The file system. Everything happens in threads, with a time limit; reading all of a version has none.

    Args:
        root: the root.
        guard: says why what is at the root's path is not the root, None where it is.
        threads: shared with others that look at the root.
        trainers: those whose own folders count as versions.
    """

    def __init__(
        self,
        root: Path,
        guard: Callable[[], str | None] | None = None,
        threads: RootThreads | None = None,
        trainers: Collection[Trainer] = (),
    ) -> None:
        self._root = root
        self._trainers = trainers
        self._guard = guard or RootGuard(root)
        self._threads = threads or RootThreads()

    async def scan(self) -> Listing | ListingFailed:
        """List the version directories."""
        try:
            return await self._threads.run("listing the root", self._scan, within=LISTING_SECONDS)
        except RootHangsError as error:
            return ListingFailed(str(error))

    def _scan(self) -> Listing | ListingFailed:
        listing = scan(self._root, self._trainers)
        # Looked at last: a file system that goes away during the scan makes it short, not empty.
        fault = self._guard()
        return listing if fault is None else ListingFailed(fault)

    async def signatures(self, paths: Sequence[str]) -> dict[str, str | Unreadable | None]:
        """Each directory's signature: names, sizes, times and inodes; None where it is gone."""
        if not paths:
            return {}
        look = partial(self._signatures, paths)
        try:
            return await self._threads.run("looking at versions", look, within=LOOK_TIMEOUT_SECONDS)
        except RootHangsError as error:
            return dict.fromkeys(paths, Unreadable(str(error)))

    def _signatures(self, paths: Sequence[str]) -> dict[str, str | Unreadable | None]:
        found = {path: self._signature(path) for path in paths}
        fault = self._guard()
        return found if fault is None else dict.fromkeys(paths, Unreadable(fault))

    def _signature(self, path: str) -> str | Unreadable | None:
        try:
            return signature(self._root, path)
        except FileNotFoundError:
            return None
        except OpeningRefusedError as error:
            return f"not a plain folder any more: {error}"  # a signature that no version has
        except OSError as error:
            return Unreadable(str(error))

    async def structure(self, path: str) -> Structure:
        """Read manifest, index and headers, no weights. Raises OSError."""
        return await self._look(structure, path)

    async def glance(self, path: str) -> Structure:
        """Read the manifest alone, and take the signature. Raises OSError."""
        return await self._look(glance, path)

    async def _look(self, look: Callable[[Path, str], Structure], path: str) -> Structure:
        def guarded() -> Structure:
            if (fault := self._guard()) is not None:
                raise RootAwayError(errno.ENODEV, fault)
            return look(self._root, path)

        return await self._threads.run(f"looking at {path}", guarded, within=LOOK_TIMEOUT_SECONDS)

    async def examine(
        self,
        seen: Structure,
        reference: Reference | Base | None,
        options: Options,
        *,
        beside: bool = False,
        fingerprinted: bool = False,
    ) -> Evidence:
        """Read everything.

        Args:
            seen: the last look, which is not repeated while the files are the same.
            reference: what the tensors are held against; None where there is nothing.
            beside: only the files beside the weights, which others prove.
            fingerprinted: whether to compute the fingerprints of all tensors in the same reading.
        """
        stop = Event()
        reading = partial(examine, seen=seen, stop=stop, beside=beside, fingerprinted=fingerprinted)
        try:
            reading = partial(reading, self._root, seen.path, reference, options)
            return await self._threads.run(f"reading {seen.path}", reading)
        finally:
            stop.set()  # a cancellation does not end the thread, which would read on to the end

    async def read_again(self, path: str) -> ReadAgain:
        """Read everything once more, for its digest alone. Raises OSError, also where it changes meanwhile."""
        stop = Event()

        def guarded() -> ReadAgain:
            try:
                return read_again(self._root, path, stop=stop)
            finally:
                if (fault := self._guard()) is not None:  # neither what is gone nor what is there says anything then
                    raise RootAwayError(errno.ENODEV, fault)

        try:
            return await self._threads.run(f"reading {path} again", guarded)
        finally:
            stop.set()

    async def keep_manifest(self, seen: Structure, manifest: Manifest) -> None:
        """Write down the manifest of a version that has none, for the ranks of engines. Durable; raises OSError."""
        await self._threads.run(f"describing {seen.path}", partial(keep_manifest, self._root, seen, manifest))

    async def sign_manifest(self, path: str, signature: str) -> None:
        """Have the kept manifest of a version count for its files as they look now. Raises OSError."""
        await self._threads.run(f"describing {path}", partial(sign_manifest, self._root, path, signature))
