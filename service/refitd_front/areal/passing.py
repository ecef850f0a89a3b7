"""Requests of clients on their way to the engine and back, untouched and as a stream; and the trainer's pause.

A client's request never carries the engine's admin key. It carries the engine's API key where the facade has one; else,
if the facade wants no token of its own, what the client sent.

A trainer's pause takes effect at the facade, not in the engine. refitd pauses an engine for its own loads and resumes
it. If the trainer's pause went to the same switch, one of the two would undo the other's, and a trainer that dies in
between would leave its engine paused for ever. So a pause ends the requests under way (AReaL asks again for the rest of
an answer that was aborted) and holds new ones back until the trainer goes on. After a while without an update the
trainer has died, and the gate opens by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus

import httpx
import structlog
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from refitd.engine.http import UNAUTHORISED, Key, KeyRefusedError

# Seconds without an update. AReaL saves its checkpoint during the pause. To open too early breaks nothing: what is
# generated meanwhile comes from the weights of before.
LONGEST_PAUSE = 300.0

log = structlog.get_logger("refitd")


class PauseGate:
    """Holds requests back while the trainer pauses. Open at first.

    Requests are counted from when they pass until they are answered to the end.

    Args:
        engine: the engine's name in the log.
        updating: whether an update is under way; a pause lasts at least as long.
        longest_pause: seconds after which the gate opens by itself.
    """

    def __init__(self, engine: str, updating: Callable[[], bool], longest_pause: float = LONGEST_PAUSE) -> None:
        self._engine = engine
        self._updating = updating
        self._longest_pause = longest_pause
        self._timer: asyncio.TimerHandle | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside = 0

    def close(self) -> None:
        self._open.clear()
        self._count_down()

    def open(self) -> None:
        self._stop_counting()
        self._open.set()

    def _count_down(self) -> None:
        self._stop_counting()
        self._timer = asyncio.get_running_loop().call_later(self._longest_pause, self._end_of_pause)

    def _stop_counting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _end_of_pause(self) -> None:
        if self._updating():
            self._count_down()
            return
        seconds = self._longest_pause
        log.warning("paused for too long without an update: generation goes on", engine=self._engine, seconds=seconds)
        self.open()

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def idle(self) -> None:
        await self._idle.wait()

    @asynccontextmanager
    async def passing(self) -> AsyncGenerator[None]:
        """Wait for the gate, then count as under way inside the context."""
        await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()


# Only these are passed on; an engine's other routes (weights, memory, profiles, settings) are for refitd alone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The call that ends all requests of an engine. `needs`: what an engine that lacks the route has to be."""

    route: str
    body: Mapping[str, bool]
    needs: str


# By AReaL's call for a pause, which says which kind of engine AReaL was told that it has.
ABORTS: Mapping[str, Abort] = {
    "/pause_generation": Abort(
        route="/abort_request", body={"abort_all": True}, needs="AReaL's backend is sglang, and the engine is none"
    ),
    "/areal_pause_generation": Abort(
        route="/abort_requests",
        body={},
        needs="AReaL's backend is vllm, so the engine has to be a vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1",
    ),
}
_HOPS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host"})
_CREDENTIALS = frozenset({b"authorization", b"proxy-authorization", b"cookie"})


class EngineProxy:
    """The engine behind a facade. `reads`: the key that clients' requests carry. Where there is none, they carry what
    the client sent if `takes_callers`.
    """

    def __init__(self, url: str, *, reads: Key | None, takes_callers: bool) -> None:
        self._reads = reads
        self._dropped = _HOPS if reads is None and takes_callers else _HOPS | _CREDENTIALS
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0), limits=no_limit
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def end_all(self, abort: "Abort", key: Key) -> None:
        """Abort the requests that run.

        Raises:
            httpx.HTTPError, KeyRefusedError: the engine was not reached, or has no such route.
        """
        request = self._http.build_request("POST", abort.route, json=abort.body)
        answer = await self._opened(request, key)
        await answer.aclose()
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise httpx.HTTPStatusError(
                f"the engine has no {abort.route}: {abort.needs}", request=request, response=answer
            )

    async def answer(self, request: Request, held: AsyncExitStack) -> Response:
        """Pass a request on; close `held` when its answer has ended."""
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
        """Send a request on; give up when the client leaves: the engine then aborts it."""
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
