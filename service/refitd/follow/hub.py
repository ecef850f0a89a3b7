"""Another refitd as the upstream: its API says which versions are good, its file routes have their bytes."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import quote

from refitd.follow.byte_source import HttpByteSource
from refitd.follow.upstream import (
    FilePart,
    UnreachableError,
    UpstreamError,
    UpstreamRun,
    UpstreamVersion,
    WrongError,
)
from refitd_client.contract.follow import HostReply, HostReport
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
    """The refitd at a URL. What it says of a run's target is for hosts that decide for themselves."""

    leads = True

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

    async def changes(self, name: str) -> AsyncIterator[bool]:
        """See `Upstream`."""
        try:
            async with aclosing(self._client.events()) as events:
                async for event in events:
                    if event.kind in {"version", "update", "run"}:
                        yield False
                    elif event.kind == "engine" and event.subject == name:
                        yield True
        except ServiceError as error:
            raise _as_upstream(self.name, error) from error

    async def manifest(self, version: str) -> bytes:
        """See `Upstream`."""
        return await self._bytes.get(f"/v1/versions/{quote(version, safe='')}/manifest", MAX_MANIFEST_BYTES)

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        """See `ByteSource`."""
        await self._bytes.fill(part, buffer)

    async def report(self, report: HostReport) -> HostReply:
        """See `Upstream`."""
        return await self._asked(self._client.report(report))

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
        allow_missing=tuple(version.allow_missing),
        allow_extra=version.allow_extra,
    )


def _as_upstream(name: str, error: ServiceError) -> UpstreamError:
    if isinstance(error, ServiceUnreachableError):
        return UnreachableError(str(error))
    is_later = isinstance(error, ServiceProblemError) and error.problem.status in _LATER
    return (UnreachableError if is_later else WrongError)(f"{name}: {error}")
