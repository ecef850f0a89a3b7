"""A bucket as the upstream: the run's pointer says which versions count, and followers' notes are the leases.

A look reads two small objects, or learns that they are unchanged; nothing is listed. What is read of a version is
believed no more than another upstream's.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import msgspec

from refitd_client.bucket.objects import Bucket, ObjectTag
from refitd_client.bucket.pointer import (
    FOLLOWERS_PREFIX,
    LEASE_SECONDS,
    MAX_BYTES,
    FollowerNote,
    Pointer,
    PointerRefusedError,
    parse_pointer,
    pointer_key,
    version_prefix,
)
from refitd_client.bucket.run import list_runs
from refitd_client.contract.follow import HostReply, HostReport
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import MANIFEST_NAME, parse_version_id
from refitd_client.errors import BucketError
from refitd_hosts.follow.upstream import (
    FilePart,
    GoneError,
    UnreachableError,
    UpstreamRun,
    UpstreamVersion,
    WrongError,
)

CHANGES_SECONDS = 1.0  # between two looks at the pointers for changes


class BucketUpstream:
    """The runs below one prefix of a bucket."""

    leads = False

    def __init__(self, bucket: Bucket) -> None:
        self.name = bucket.name
        self._bucket = bucket
        self._seen: dict[str, tuple[ObjectTag, Pointer]] = {}

    async def look(self, run: str | None) -> Sequence[UpstreamRun]:
        with _as_upstream():
            runs = await list_runs(self._bucket) if run is None else [run]
            pointers = [await self._pointer(each) for each in runs]
        return [_run(pointer) for pointer in pointers if pointer is not None and (run or not pointer.is_closed)]

    async def _pointer(self, run: str) -> Pointer | None:
        """The run's pointer, which is sent only if it is not the one that was read last."""
        known = self._seen.get(run)
        found = await self._bucket.read_changed(pointer_key(run), MAX_BYTES, None if known is None else known[0])
        if found is None and known is not None:
            raise WrongError(
                f"the pointer of run {run} in {self.name} was deleted: this host serves on. Restore "
                f"{pointer_key(run)}, or publish again"
            )
        if found is None:
            return None
        if found == "same" and known is not None:
            return known[1]
        if found == "same":
            raise WrongError(f"{self.name} said that a pointer is unchanged which it was not asked about")
        try:
            pointer = parse_pointer(found.data, run)
        except PointerRefusedError as error:
            raise WrongError(f"{pointer_key(run)} in {self.name} is not the pointer of run {run}: {error}") from None
        if known is not None and pointer.newest < known[1].newest:
            raise WrongError(f"the pointer of run {run} in {self.name} went back: what it names is not followed")
        self._seen[run] = found.facts.tag, pointer
        return pointer

    async def changes(self, name: str) -> AsyncIterator[bool]:
        """See `Upstream`. A store does not tell of changes: the pointers that were looked at are asked for."""
        del name
        while True:
            await asyncio.sleep(CHANGES_SECONDS)
            for run, known in list(self._seen.items()):
                with _as_upstream():
                    found = await self._bucket.read_changed(pointer_key(run), MAX_BYTES, known[0])
                if found != "same":
                    yield False

    async def manifest(self, version: str) -> bytes:
        with _as_upstream():
            found = await self._bucket.read(self._key(version, MANIFEST_NAME), MAX_MANIFEST_BYTES)
        if found is None:
            raise GoneError(f"{self.name} does not have {version} any more")
        return found.data

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        with _as_upstream():
            is_there = await self._bucket.fill(self._key(part.version, part.file), part.start, buffer)
        if not is_there:
            raise GoneError(f"{self.name} does not have {part.file} of {part.version} any more")

    async def report(self, report: HostReport) -> HostReply:
        """Write the follower's note. What it pulls or serves is leased from when the store has taken it."""
        note = FollowerNote(
            follower=report.told.follower,
            holds=report.holds,
            pulls=report.pulls,
            serves=report.told.serves,
            run=report.told.run,
        )
        key = f"{FOLLOWERS_PREFIX}{quote(report.told.follower, safe='')}.json"
        with _as_upstream():
            await self._bucket.write(key, msgspec.json.encode(note))
        return HostReply(lease_seconds=LEASE_SECONDS)

    async def aclose(self) -> None:
        """The library keeps its own connections."""

    def _key(self, version: str, file: str) -> str:
        parsed = parse_version_id(version)
        if parsed is None or "/" in file:
            raise WrongError(f"{version!a} with file {file!a} is no version's file")
        return version_prefix(*parsed) + file


def _run(pointer: Pointer) -> UpstreamRun:
    return UpstreamRun(
        run=pointer.run,
        versions=tuple(
            UpstreamVersion(
                id=version.id,
                run=pointer.run,
                order=version.order,
                digest=version.digest,
                kind=version.kind,
                base=version.base,
                bytes=version.bytes,
                pinned=version.pinned,
                barred=version.barred,
                allow_missing=version.may_lack,
                allow_extra=version.allow_extra,
            )
            for version in pointer.versions
        ),
        desired=pointer.target,
        is_closed=pointer.is_closed,
    )


@contextmanager
def _as_upstream() -> Generator[None]:
    try:
        yield
    except BucketError as error:
        raise (UnreachableError if error.may_heal else WrongError)(str(error)) from None
