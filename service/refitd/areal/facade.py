"""An engine as AReaL sees it: SGLang's routes on a port of its own, with refitd as the only one who writes weights.

/generate, /v1/… and whatever else      to the engine and back, untouched, as a stream
/pause_generation                        the facade's gate: running requests are aborted, new ones wait
/update_weights_from_disk                the folder becomes a version; answered when engines serve it
/load_lora_adapter                       likewise, where versions are adapters
/unload_lora_adapter                     done: refitd unloads what nobody uses any more
/continue_generation                     the gate opens
other routes that write weights          refused: they would change the engine behind refitd's back
/release_…, /resume_memory_occupation    refused: what AReaL calls where trainer and engine take turns on their GPUs
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from refitd.areal.gate import Gate
from refitd.areal.updates import Updates
from refitd.engine.keys import Key, KeyRefusedError

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
WRITES = (
    *("/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"),
    *("/update_weight_version", "/load_lora_adapter_from_tensors"),
)
OFFLOADS = ("/release_memory_occupation", "/resume_memory_occupation")
_REFUSED = frozenset({401, 403})
DRAIN_SECONDS = 30.0
AGAIN_SECONDS = 0.5
GENERATES = ("/generate", "/v1/")
_HOPS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "authorization"}
)


class Facade:
    """The facade of one engine. `api_key` and `admin_key` are files with the engine's keys, as refitd has them."""

    def __init__(self, engine: str, updates: Updates, *, api_key: Path | None, admin_key: Path | None) -> None:
        self._updates = updates
        self._gate = Gate(engine, lambda: updates.under_way > 0)
        self._reads, self._changes = Key(api_key or admin_key), Key(admin_key or api_key)
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=engine, trust_env=False, timeout=httpx.Timeout(None, connect=10.0), limits=no_limit
        )

    def app(self) -> Starlette:
        """Its application."""
        routes = [
            Route("/pause_generation", self._pause, methods=["POST"]),
            Route("/continue_generation", self._continue, methods=["POST"]),
            Route("/update_weights_from_disk", self._update, methods=["POST"]),
            Route("/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            *(Route(path, _refuse, methods=METHODS) for path in WRITES),
            *(Route(path, _refuse_offload, methods=METHODS) for path in OFFLOADS),
            Route("/{path:path}", self._through, methods=METHODS),
        ]
        return Starlette(routes=routes)

    async def aclose(self) -> None:
        """Let go of what waits, and give the connections back."""
        self._gate.open()
        await self._http.aclose()

    async def _pause(self, _: Request) -> Response:
        self._gate.close()
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._abort()
        except (httpx.HTTPError, KeyRefusedError, TimeoutError) as error:
            self._gate.open()  # the trainer hears that nothing is paused, and so nothing is
            return JSONResponse({"message": f"not paused: {error or 'requests still run'}"}, status_code=503)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _abort(self) -> None:
        """End what runs. One that was on its way to the engine when the others ended is ended the next time."""
        while not self._gate.is_idle:
            request = self._http.build_request("POST", "/abort_request", json={"abort_all": True})
            await (await self._opened(request, self._changes)).aclose()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle(), AGAIN_SECONDS)

    async def _continue(self, _: Request) -> Response:
        self._gate.open()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        fault = await self._served(request, "model_path")
        content: dict[str, Any] = {"success": fault is None, "num_paused_requests": 0}
        message = "Succeeded to update model weights." if fault is None else fault
        return JSONResponse({**content, "message": message}, status_code=200 if fault is None else 400)

    async def _load_adapter(self, request: Request) -> Response:
        fault = await self._served(request, "lora_path")
        content: dict[str, Any] = {"success": fault is None, "error_message": fault, "loaded_adapters": {}}
        return JSONResponse(content, status_code=200 if fault is None else 400)

    async def _unload_adapter(self, _: Request) -> Response:
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _served(self, request: Request, key: str) -> str | None:
        try:
            body: Any = await request.json()
            path = Path(body[key])
        except (ValueError, TypeError, KeyError):
            return f"the body is no JSON object with {key}"
        if not path.is_absolute():
            return f"{key} {str(path)!r} is no absolute path: the engine and refitd may start from different folders"
        return await self._updates.serve(path)

    async def _through(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            if request.method == "POST" and request.url.path.startswith(GENERATES):
                await stack.enter_async_context(self._gate.passing())
            try:
                answer = await self._send(request)
            except (httpx.HTTPError, KeyRefusedError) as error:
                return JSONResponse({"error": {"message": f"the engine cannot be reached: {error}"}}, status_code=502)
            except ClientDisconnect:
                return Response(status_code=499)
            stack.push_async_callback(answer.aclose)
            held = stack.pop_all()
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOPS}
        return StreamingResponse(
            _until_closed(answer, held), answer.status_code, headers, background=BackgroundTask(held.aclose)
        )

    async def _send(self, request: Request) -> httpx.Response:
        """Send a request on; give up when the client does: the engine aborts what nobody waits for."""
        content = await request.body()
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _HOPS}
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._http.build_request(request.method, url, content=content, headers=kept)
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

    async def _opened(self, request: httpx.Request, key: Key) -> httpx.Response:
        """Send with the key; once more where the engine refuses it and its file holds another one by now."""
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


async def _refuse(request: Request) -> Response:
    message = (
        f"{request.url.path} would change the engine behind refitd, which is the only one that writes its weights: "
        "set AReaL's weight_update_mode to disk"
    )
    return JSONResponse({"success": False, "message": message}, status_code=409)


async def _refuse_offload(request: Request) -> Response:
    message = (
        f"{request.url.path} is not carried through: refitd loads weights when there are any, also into memory "
        "that was given back. Start the engine outside AReaL, with its own share of the GPU (mem_fraction_static), "
        "and leave scheduling_strategy at separation"
    )
    return JSONResponse({"success": False, "message": message}, status_code=409)
