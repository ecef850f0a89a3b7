"""The HTTP application of one engine, and how several of them run in one process.

Errors have SGLang's shapes: a body that does not validate is 400 (not 422) with `{object, message, type, param, code}`,
a request that cannot be served is 400 with `{"error": {"message"}}`, a wrong key is 401 with `{"error"}`.

Bearer tokens open routes as in SGLang:

    no keys            everything is open
    API key            everything but probes wants it
    admin key          routes that change something want it
    both               routes that change something want the admin key alone, the others the API key

Probes (`/health…`, `/ready…`, `/metrics…`) are always open.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.routes import control_routes, generate_routes, info_routes, lora_routes, weights_routes

OPEN = ("/health", "/ready", "/metrics")
ADMIN = frozenset(
    (
        "/update_weights_from_disk",
        "/update_weight_version",
        "/weights_checker",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/abort_request",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/embedded/interrupt_loads",
    )
)
VERSION = "0.5.23+refitd-embedded"
"""The SGLang whose API this is, marked as not being it."""
DRAIN_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys that clients have to send, None for a key that is not wanted."""

    api: str | None = None
    admin: str | None = None

    def wanted(self, path: str) -> str | None:
        if path.startswith(OPEN):
            return None
        return (self.admin or self.api) if path in ADMIN else self.api


class BearerAuth:
    """ASGI middleware: 401 `{"error": "Unauthorized"}` without the right key. Plain ASGI, so that a disconnect of the
    client stays visible to the routes.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (wanted := self._keys.wanted(scope["path"])) is not None:
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            sent = token.encode() if scheme.lower() == "bearer" else b""
            if not secrets.compare_digest(sent, wanted.encode()):
                await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(engine: EmbeddedEngine, *, keys: ApiKeys | None = None, launch: dict[str, Any] | None = None) -> FastAPI:
    """The application. Its lifespan runs the engine: a server enters it, as `app.router.lifespan_context(app)`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="refitd_embedded", version=VERSION, lifespan=lifespan, openapi_url=None)
    app.include_router(generate_routes(engine))
    app.include_router(weights_routes(engine))
    app.include_router(control_routes(engine))
    app.include_router(lora_routes(engine.adapters))
    app.include_router(info_routes(engine, _launch(engine) | (launch or {})))
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(BearerAuth, keys=keys or ApiKeys())
    return app


def _launch(engine: EmbeddedEngine) -> dict[str, Any]:
    """Start-up values at top level, where SGLang has them. They never change."""
    config = engine.decoder.config
    return {
        "version": VERSION,
        "model_path": engine.startup_path,
        "served_model_name": engine.startup_path,
        "tokenizer_path": engine.startup_path,
        "skip_tokenizer_init": True,
        "load_format": engine.labels.load_format,
        "weight_version": engine.labels.weight_version,
        "dtype": config.dtype,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "context_length": config.max_position_embeddings,
        "max_running_requests": engine.options.most_running,
        "device": "cpu",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "nnodes": 1,
        "enable_lora": engine.options.enable_lora,
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
    }


async def _refused(_http: Request, problem: Exception) -> Response:
    code, message, kind = 400, str(problem), "Bad Request"
    if isinstance(problem, HTTPException):
        code, message, kind = problem.status_code, problem.detail, str(problem.status_code)
    content = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
    return JSONResponse(content, status_code=code)


class ReplicaServer(uvicorn.Server):
    """uvicorn without signal handlers of its own (several run in one process), and able to die like a process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (sockets or ()) if self.started else ():
            host, port = listener.getsockname()[:2]
            print(f"refitd_embedded ready on http://{host}:{port}", flush=True)

    def drop_dead(self) -> None:
        """Stop listening and reset every connection, as if the process were gone."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self.force_exit = self.should_exit = True


async def serve(apps: Sequence[tuple[EmbeddedEngine, FastAPI]], sockets: Sequence[socket.socket]) -> None:
    """Serve each application on its socket until SIGTERM or SIGINT; then let answers end for DRAIN_SECONDS.

    Prints `refitd_embedded ready on http://HOST:PORT` for each to standard output, once it listens. When an engine
    dies, so does the process, or with several of them that replica alone.
    """
    config = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": DRAIN_SECONDS}
    servers = [ReplicaServer(uvicorn.Config(app, **config)) for _, app in apps]
    for server, (engine, _) in zip(servers, apps, strict=True):
        engine.on_death = partial(_die, server, alone=len(apps) == 1)
    with _signals_stop(servers):
        async with asyncio.TaskGroup() as group:
            for server, listener in zip(servers, sockets, strict=True):
                group.create_task(server.serve(sockets=[listener]))


def _die(server: ReplicaServer, last_words: str, *, alone: bool) -> None:
    print(f"refitd_embedded: the scheduler died: {last_words}", file=sys.stderr, flush=True)
    if alone:
        os._exit(1)
    server.drop_dead()


@contextlib.contextmanager
def _signals_stop(servers: Sequence[ReplicaServer]) -> Iterator[None]:
    def stop() -> None:
        for server in servers:
            server.should_exit = True

    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
