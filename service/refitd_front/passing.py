"""Requests of clients on their way to an engine and back, untouched and as a stream.

A client's request never carries the engine's admin key, but for one that ends requests, as its pause does. It carries
the engine's API key where the front has one; else, if the front wants no token of its own, what the client sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus

import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from refitd.engine.http import UNAUTHORISED, Key, KeyRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The call by which a kind of engine ends all requests."""

    route: str
    body: Mapping[str, bool]


ABORTS: Mapping[str, Abort] = {
    "SGLang": Abort(route="/abort_request", body={"abort_all": True}),
    "vLLM": Abort(route="/abort_requests", body={}),  # 0.32 or later, with VLLM_SERVER_DEV_MODE=1
}
_HOPS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host"})
_CREDENTIALS = frozenset({b"authorization", b"proxy-authorization", b"cookie"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """What opens the engines.

    Attributes:
        reads: the key that clients' requests carry; None: they carry what the client sent if `takes_callers`.
        changes: the key of calls that end requests.
        takes_callers: whether the front has no token of its own.
    """

    reads: Key | None
    changes: Key
    takes_callers: bool


class EngineProxy:
    """One engine, or a router. `under_way` counts the requests that are being answered."""

    def __init__(self, url: str, keys: EngineKeys) -> None:
        self.url = url
        self.under_way = 0
        self._reads, self._changes = keys.reads, keys.changes
        self._dropped = _HOPS if keys.reads is None and keys.takes_callers else _HOPS | _CREDENTIALS
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0), limits=no_limit
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def end_all(self, server: str | None) -> None:
        """Abort the requests that run. `server` is the kind of the engine, None where it is not known.

        Raises:
            httpx.HTTPError, KeyRefusedError: the engine was not reached, or has no such route.
        """
        known = None if server is None else ABORTS.get(server)
        kinds = ABORTS.values() if known is None else [known]
        for abort in kinds:
            request = self._http.build_request("POST", abort.route, json=abort.body)
            answer = await self._opened(request, self._changes)
            await answer.aclose()
            if answer.status_code != HTTPStatus.NOT_FOUND:
                return
        raise httpx.RequestError(
            f"the engine {self.url} has no route that ends its requests: it has to be SGLang, or vLLM 0.32 or later "
            "with VLLM_SERVER_DEV_MODE=1"
        )

    async def answer(self, request: Request, held: AsyncExitStack, *, ends: bool = False) -> Response:
        """Pass a request on; close `held` when its answer has ended.

        Args:
            ends: it ends requests, which engines take for a change.
        """
        self.under_way += 1
        held.callback(self._ended)
        async with held as stack:
            try:
                answer = await self._send(request, self._changes if ends else self._reads)
            except (httpx.HTTPError, KeyRefusedError) as error:
                return JSONResponse({"error": {"message": f"the engine cannot be reached: {error}"}}, status_code=502)
            except ClientDisconnect:
                return Response(status_code=499)
            stack.push_async_callback(answer.aclose)
            kept = stack.pop_all()
        response = StreamingResponse(
            _until_closed(answer, kept), answer.status_code, background=BackgroundTask(kept.aclose)
        )
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOPS
        ]
        return response

    def _ended(self) -> None:
        self.under_way -= 1

    async def _send(self, request: Request, key: Key | None) -> httpx.Response:
        """Send a request on; give up when the client leaves: the engine then aborts it."""
        scope = request.scope
        kept = [(name, value) for name, value in scope["headers"] if name not in self._dropped]
        url = httpx.URL(path=scope["path"], query=scope["query_string"] or None)
        sent = self._http.build_request(scope["method"], url, content=await request.body(), headers=kept)
        asking = asyncio.create_task(self._opened(sent, key))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ClientDisconnect
            return asking.result()
        finally:
            for task in (leaving, asking):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await leaving

    async def _opened(self, request: httpx.Request, key: Key | None) -> httpx.Response:
        """Send with the key; once more where the engine refuses it and its file holds another one by now."""
        if key is None:
            return await self._http.send(request, stream=True)
        request.headers.update(await key.headers())
        answer = await self._http.send(request, stream=True)
        if answer.status_code in UNAUTHORISED and await key.is_another_now():
            await answer.aclose()
            request.headers.update(await key.headers())
            answer = await self._http.send(request, stream=True)
        return answer


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until_closed(answer: httpx.Response, held: AsyncExitStack) -> AsyncGenerator[bytes]:
    """Yield the bytes as they come. At the end, also when the client leaves, the request is no longer under way."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await held.aclose()
