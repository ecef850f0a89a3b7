"""Requests of clients on their way to the engine, and the answers on their way back, untouched and as a stream.

A client's request never carries the engine's admin key. It carries the engine's API key where the facade has one; else,
if the facade wants no token of its own, what the client sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, suppress

import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from refitd.engine.keys import Key, KeyRefusedError

# Only these go on; what else an engine has (weights, memory, profiles, its own settings) is for refitd alone.
PASSED: Mapping[str, str] = {
    "/generate": "POST",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/model_info": "GET",
    "/get_model_info": "GET",
    "/health": "GET",
    "/health_generate": "GET",
    "/ping": "GET",
}
GENERATES = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_REFUSED = frozenset({401, 403})
_HOPS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host"})
_CREDENTIALS = frozenset({b"authorization", b"proxy-authorization", b"cookie"})


class Engine:
    """The engine behind a facade.

    Args:
        url: where it is.
        reads: the key that clients' requests carry, None where none does.
        takes_callers: whether they carry what the client sent instead, where there is no such key.
    """

    def __init__(self, url: str, *, reads: Key | None, takes_callers: bool) -> None:
        self._reads = reads
        self._dropped = _HOPS if reads is None and takes_callers else _HOPS | _CREDENTIALS
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0), limits=no_limit
        )

    async def aclose(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def end_all(self, key: Key) -> None:
        """End what runs.

        Raises:
            httpx.HTTPError, KeyRefusedError: the engine was not reached.
        """
        request = self._http.build_request("POST", "/abort_request", json={"abort_all": True})
        await (await self._opened(request, key)).aclose()

    async def answer(self, request: Request, held: AsyncExitStack) -> Response:
        """Pass a request on. `held` is closed when its answer has ended."""
        async with held as stack:
            try:
                answer = await self._send(request)
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

    async def _send(self, request: Request) -> httpx.Response:
        """Send a request on; give up when the client does: the engine aborts what nobody waits for."""
        scope = request.scope
        kept = [(name, value) for name, value in scope["headers"] if name not in self._dropped]
        url = httpx.URL(path=scope["path"], query=scope["query_string"] or None)
        sent = self._http.build_request(scope["method"], url, content=await request.body(), headers=kept)
        asking = asyncio.create_task(self._opened(sent, self._reads))
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
        if answer.status_code in _REFUSED and await key.is_another_now():
            await answer.aclose()
            request.headers.update(await key.headers())
            answer = await self._http.send(request, stream=True)
        return answer


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until_closed(answer: httpx.Response, held: AsyncExitStack) -> AsyncGenerator[bytes]:
    """The bytes as they come. However it ends, also by a client that leaves, the request is not under way any more."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await held.aclose()
