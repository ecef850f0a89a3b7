"""Another refitd as the upstream: its API says which versions are good, its file routes have their bytes."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar
from urllib.parse import quote

import httpx

from refitd_client.contract.follow import HostReply, HostReport
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Standing, VersionState
from refitd_client.contract.wire import Event, RunGlance, Version
from refitd_client.errors import ServiceError, ServiceProblemError, ServiceUnreachableError
from refitd_client.http import routes
from refitd_client.http.client import EventReader, httpx_options, is_event_stream, stream_request
from refitd_client.http.connection import ONE_CALL_EACH, Body, Connection, connect_to, in_use, no_certificates
from refitd_client.http.exchange import (
    HttpReply,
    LostReply,
    failure,
    http_request,
    late_reply,
    lost_reply,
    quietly,
    read_outcome,
    reply_of,
    seconds_of,
)
from refitd_client.http.routes import Call
from refitd_hosts.follow.byte_source import NOT_NOW, HttpByteSource
from refitd_hosts.follow.upstream import (
    FilePart,
    UnreachableError,
    UpstreamError,
    UpstreamRun,
    UpstreamVersion,
    WrongError,
)

ANSWER_SECONDS = 10.0
LISTED = 200  # versions of a run: a chain of deltas from the newest down to a full one lies within them
AnswerT = TypeVar("AnswerT")


async def _body_of(response: httpx.Response, most: int) -> bytes:
    body = Body(response, most)
    async for piece in response.aiter_bytes():
        body.add(piece)
    return b"".join(body.pieces)


class _RenewedTransport(httpx.AsyncBaseTransport):
    """httpx's, with the certificates that the files hold when a connection is made."""

    def __init__(self) -> None:
        self._now: tuple[ssl.SSLContext, httpx.AsyncHTTPTransport] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_tls = request.url.scheme == "https"
        context = await asyncio.to_thread(in_use().context) if is_tls else no_certificates()
        if self._now is None or self._now[0] is not context:
            self._now = context, httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=ONE_CALL_EACH)
        return await self._now[1].handle_async_request(request)

    async def aclose(self) -> None:
        if self._now is not None:
            await self._now[1].aclose()


class HubUpstream:
    """The refitd at a URL. What it says of a run's target is for hosts that decide for themselves.

    Each question is asked once. It gets the upstream's token or none, and never this service's own.
    """

    leads = True

    def __init__(self, connection: Connection) -> None:
        """Send nothing yet. Raises ValueError if the URL, or the files for TLS, cannot be used."""
        connect_to(connection.url, token="-")  # noqa: S106 - checked alone: without a token it would look for one
        self.name = connection.url
        self._connection = connection
        self._threads = ThreadPoolExecutor(32, "refitd-pull")
        self._bytes = HttpByteSource(connection, threads=self._threads)
        self._http = httpx.AsyncClient(transport=_RenewedTransport(), **httpx_options())

    async def look(self, run: str | None) -> Sequence[UpstreamRun]:
        overview = await self._ask(routes.overview())
        glances = [glance for glance in overview.runs if run in {None, glance.run}]
        return [await self._run(glance) for glance in glances if run is not None or glance.closed_at is None]

    async def _run(self, glance: RunGlance) -> UpstreamRun:
        page = await self._ask(routes.versions(glance.run, VersionState.SEALED, LISTED))
        return UpstreamRun(
            run=glance.run,
            versions=tuple(_version(version) for version in page.items),
            desired=glance.target,
            barred=tuple(page.barred),
            is_closed=glance.standing is Standing.CLOSED,
            is_paused=glance.paused_since is not None,
        )

    async def _ask(self, call: Call[AnswerT]) -> AnswerT:
        try:
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                return await self._exchange(call)
        except TimeoutError as error:
            raise UnreachableError(f"{self.name} did not answer within {2 * ANSWER_SECONDS:g} s") from error
        except ServiceError as error:
            raise _as_upstream(self.name, error) from error

    async def _exchange(self, call: Call[AnswerT]) -> AnswerT:
        # In a thread: it may read the token file.
        arguments = await asyncio.to_thread(http_request, self._connection, call, ANSWER_SECONDS)
        within = seconds_of(call, ANSWER_SECONDS)
        outcome: HttpReply | LostReply
        try:
            with quietly():
                async with asyncio.timeout(within), self._http.stream(**arguments) as response:
                    outcome = reply_of(response, await _body_of(response, call.most))
        except TimeoutError:
            outcome = late_reply(arguments["url"], within)
        except httpx.RequestError as error:
            outcome = lost_reply(arguments["url"], error)
        return read_outcome(call, outcome)

    async def changes(self, name: str) -> AsyncIterator[bool]:
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if event.kind in {"version", "update", "run"}:
                        yield False
                    elif event.kind == "engine" and event.subject == name:
                        yield True
        except ServiceError as error:
            raise _as_upstream(self.name, error) from error

    async def _events(self) -> AsyncGenerator[Event]:
        """The hub's events from now on, until the stream ends: with an error, unless the hub wants no reader."""
        call, reader = routes.events(), EventReader(self.name)
        arguments = await asyncio.to_thread(stream_request, self._connection, reader.headers, ANSWER_SECONDS)
        within = seconds_of(call, ANSWER_SECONDS)
        outcome: HttpReply | LostReply = LostReply(url=arguments["url"], sent=True, reason="the event stream ended")
        try:
            async with AsyncExitStack() as opened:
                with quietly():
                    async with asyncio.timeout(within):  # until it is open
                        response = await opened.enter_async_context(self._http.stream(**arguments))
                        if response.status_code == 204:
                            return
                        if not is_event_stream(response):
                            outcome = reply_of(response, await _body_of(response, call.most))
                if is_event_stream(response):
                    async for chunk in response.aiter_bytes():
                        for event in reader.feed(chunk):
                            yield event
        except TimeoutError:
            outcome = late_reply(arguments["url"], within)
        except httpx.RequestError as error:
            outcome = lost_reply(arguments["url"], error)
        raise failure(call, outcome)

    async def manifest(self, version: str) -> bytes:
        return await self._bytes.get(f"/v1/versions/{quote(version, safe='')}/manifest", MAX_MANIFEST_BYTES)

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        await self._bytes.fill(part, buffer)

    async def report(self, report: HostReport) -> HostReply:
        return await self._ask(routes.report(report))

    async def aclose(self) -> None:
        await self._http.aclose()
        await self._bytes.aclose()
        self._threads.shutdown(wait=False)


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
    is_later = isinstance(error, ServiceProblemError) and error.problem.status in NOT_NOW
    return (UnreachableError if is_later else WrongError)(f"{name}: {error}")
