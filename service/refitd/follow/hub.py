"""Another refitd as the upstream: its API says which versions are good, its file routes have their bytes."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from refitd.follow.byte_source import RELAY_CONNECT_SECONDS, HttpByteSource
from refitd.follow.upstream import (
    ByteSource,
    FilePart,
    UnreachableError,
    UpstreamError,
    UpstreamRun,
    UpstreamVersion,
    WrongError,
)
from refitd.text import is_web_address
from refitd_client.contract.decoding import from_json
from refitd_client.contract.follow import FileBlocks, FollowerReport, ReportAnswer
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Standing, VersionState
from refitd_client.contract.wire import RunGlance, Version
from refitd_client.errors import ServiceError, ServiceProblemError, ServiceUnreachableError
from refitd_client.http.client import AsyncRefitClient
from refitd_client.http.connection import Connection
from refitd_client.http.exchange import RetryPolicy

ANSWER_SECONDS = 10.0
LISTED = 200  # versions of a run: a chain of deltas from the newest down to a full one lies within them
_MAX_BLOCKS_BYTES = 64 * 2**20
_ONCE = RetryPolicy(deadline=0.0)
AnswerT = TypeVar("AnswerT")
_LATER = frozenset({408, 429, 500, 502, 503, 504, 507})


class _Client(AsyncRefitClient):
    """Sends the upstream's token or none, and never this service's own, which is in the environment."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(
            connection.url,
            token="-",  # noqa: S106 - none: see below
            timeout=ANSWER_SECONDS,
            retry=_ONCE,
        )
        self._connection = connection


class HubUpstream:
    """The refitd at a URL. What it says of a run's target is for followers that it does not lead."""

    def __init__(self, connection: Connection) -> None:
        """Send nothing yet."""
        self._connection = connection
        self._threads = ThreadPoolExecutor(32, "refitd-pull")
        self._bytes = HttpByteSource(connection, threads=self._threads)
        self._client = _Client(connection)

    @property
    def name(self) -> str:
        """Its URL."""
        return self._connection.url

    async def look(self, run: str | None) -> Sequence[UpstreamRun]:
        """See `Upstream`."""
        overview = await self._asked(self._client.overview())
        glances = [glance for glance in overview.runs if run in {None, glance.run}]
        return [await self._run(glance) for glance in glances if run is not None or glance.closed_at is None]

    async def _run(self, glance: RunGlance) -> UpstreamRun:
        page = await self._asked(self._client.versions(glance.run, VersionState.SEALED, LISTED))
        return UpstreamRun(
            run=glance.run,
            versions=tuple(_version(version) for version in page.items),
            desired=glance.target,
            barred=tuple(page.barred),
            is_closed=glance.standing is Standing.CLOSED,
            is_paused=glance.paused_since is not None,
        )

    async def changes(self) -> AsyncIterator[None]:
        """See `Upstream`."""
        try:
            async with aclosing(self._client.events()) as events:
                async for event in events:
                    if event.kind in {"version", "rollout", "run"}:
                        yield None
        except ServiceError as error:
            raise _as_upstream(self.name, error) from error

    async def manifest(self, version: str) -> bytes:
        """See `Upstream`."""
        return await self._bytes.get(f"/v1/versions/{quote(version, safe='')}/manifest", MAX_MANIFEST_BYTES)

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        """See `ByteSource`."""
        await self._bytes.fill(part, buffer)

    async def blocks(self, version: str, file: str, size: int) -> Sequence[bytes] | None:
        """See `Upstream`. An older release knows those of the manifest's size alone, and says so."""
        path = f"/v1/versions/{quote(version, safe='')}/files/{quote(file, safe='')}/blocks?size={size}"
        data = await self._bytes.get(path, _MAX_BLOCKS_BYTES)
        try:
            told = from_json(data, FileBlocks)
            return [bytes.fromhex(digest) for digest in told.blocks] if told.size == size else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise WrongError(f"{self.name}{path} answered with what is no list of digests: {error}") from error

    @property
    def knows_blocks(self) -> bool:
        """See `Upstream`."""
        return True

    async def report(self, report: FollowerReport) -> ReportAnswer:
        """See `Upstream`."""
        self._bytes.asked_by = report.follower
        return await self._asked(self._client.report(report))

    def relay(self, url: str) -> ByteSource | None:
        """See `Upstream`. The follower there gets the token that this one has for the upstream, which is not sent
        unencrypted where the upstream gets it encrypted.
        """
        is_open = self.name.startswith("https:") and not url.startswith("https:")
        if is_open or not is_web_address(url) or "@" in url:
            return None
        connection = replace(self._connection, url=url.rstrip("/"))
        return HttpByteSource(connection, threads=self._threads, connect_seconds=RELAY_CONNECT_SECONDS)

    async def aclose(self) -> None:
        """See `ByteSource`."""
        await self._client.aclose()
        await self._bytes.aclose()
        self._threads.shutdown(wait=False)

    async def _asked(self, asking: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        try:
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                return await asking
        except TimeoutError as error:
            raise UnreachableError(f"{self.name} did not answer within {2 * ANSWER_SECONDS:g} s") from error
        except ServiceError as error:
            raise _as_upstream(self.name, error) from error


def _version(version: Version) -> UpstreamVersion:
    return UpstreamVersion(
        id=version.id,
        run=version.run,
        order=Order(version.generation, version.step),
        digest=version.digest,
        kind=version.kind,
        base=version.base,
        bytes=version.bytes,
        pinned=version.pinned,
        barred=version.barred,
        allow_missing=version.allow_missing,
        allow_extra=version.allow_extra,
    )


def _as_upstream(name: str, error: ServiceError) -> UpstreamError:
    if isinstance(error, ServiceUnreachableError):
        return UnreachableError(str(error))
    is_later = isinstance(error, ServiceProblemError) and error.problem.status in _LATER
    return (UnreachableError if is_later else WrongError)(f"{name}: {error}")
