"""The HTTP application of one engine, and how several of them run in one process.

Errors have SGLang's shapes: a body that does not validate is 400 (not 422) with `{object, message, type, param, code}`,
a request that cannot be served is 400 with `{"error": {"message"}}`, a wrong key is 401 with `{"error"}`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from refitd_embedded.auth import BearerAuth, Keys
from refitd_embedded.engine import Engine
from refitd_embedded.routes_control import control_routes
from refitd_embedded.routes_generate import generate_routes
from refitd_embedded.routes_info import info_routes
from refitd_embedded.routes_lora import Adapters, lora_routes
from refitd_embedded.routes_weights import weights_routes

VERSION = "0.5.23+refitd-embedded"
"""The SGLang whose API this is, marked as not being it."""
DRAIN_SECONDS = 5


def create_app(engine: Engine, *, keys: Keys | None = None, launch: dict[str, Any] | None = None) -> FastAPI:
    """The application. Its lifespan runs the engine, so a server (or `app.router.lifespan_context(app)`) must enter it.

    `launch` is merged into what /server_info says about the start.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="refitd_embedded", version=VERSION, lifespan=lifespan, openapi_url=None)
    app.include_router(generate_routes(engine))
    app.include_router(weights_routes(engine))
    app.include_router(control_routes(engine))
    adapters = Adapters(enabled=engine.options.enable_lora)
    app.include_router(lora_routes(adapters))
    app.include_router(info_routes(engine, _launch(engine) | (launch or {}), adapters))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(BearerAuth, keys=keys or Keys())
    return app


def _launch(engine: Engine) -> dict[str, Any]:
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
        "context_length": engine.bounds.context_length,
        "max_running_requests": engine.options.limits.running,
        "max_prefill_tokens": engine.options.limits.prefill,
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


async def _invalid(_http: Request, problem: Exception) -> Response:
    content = {"object": "error", "message": str(problem), "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(content, status_code=400)


async def _refused(_http: Request, problem: Exception) -> Response:
    if not isinstance(problem, HTTPException):
        raise TypeError(f"not an HTTPException: {problem!r}")
    code = problem.status_code
    content = {"object": "error", "message": problem.detail, "type": str(code), "param": None, "code": code}
    return JSONResponse(content, status_code=code)


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own (several run in one process), and able to die like a process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and say so."""
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


async def serve(apps: Sequence[tuple[Engine, FastAPI]], sockets: Sequence[socket.socket]) -> None:
    """Serve each application on its socket until SIGTERM or SIGINT; then let answers end for DRAIN_SECONDS.

    Prints `refitd_embedded ready on http://HOST:PORT` for each to standard output, once it listens. When an engine
    dies, so does the process, or with several of them that replica alone.
    """
    config = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": DRAIN_SECONDS}
    servers = [Server(uvicorn.Config(app, **config)) for _, app in apps]
    for server, (engine, _) in zip(servers, apps, strict=True):
        engine.on_death = _death(server, alone=len(apps) == 1)
    with _signals_stop(servers):
        async with asyncio.TaskGroup() as group:
            for server, listener in zip(servers, sockets, strict=True):
                group.create_task(server.serve(sockets=[listener]))


def _death(server: Server, *, alone: bool) -> Any:
    def die(last_words: str) -> None:
        print(f"refitd_embedded: the scheduler died: {last_words}", file=sys.stderr, flush=True)
        if alone:
            os._exit(1)
        server.drop_dead()

    return die


@contextlib.contextmanager
def _signals_stop(servers: Sequence[Server]) -> Iterator[None]:
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
