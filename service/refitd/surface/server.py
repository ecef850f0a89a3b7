"""uvicorn inside the service: it serves until SIGTERM or SIGINT, and leaves the rest of the shutdown to the service."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from socket import socket
from typing import cast

import uvicorn
from fastapi import FastAPI

from refitd.logs import announce
from refitd.surface.connection import Connection, Patience, protocol

PATIENCE = Patience()
CLOSE_SECONDS = 2  # what an open event stream gets when the service stops


class Server(uvicorn.Server):
    """Says on stdout when it listens, with the port that it got. Clients get what `patience` allows them."""

    look_ticks = 10  # uvicorn ticks ten times a second

    def __init__(self, api: FastAPI, host: str, port: int, patience: Patience = PATIENCE) -> None:
        super().__init__(
            uvicorn.Config(
                api,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSE_SECONDS,
                timeout_keep_alive=patience.idle,  # pyright: ignore[reportArgumentType] - it goes to call_later
                http=protocol(patience),
                ws="none",
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take signals over from uvicorn, which raises them again after serving and would kill the drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # a second one must not cut an update in half

    async def on_tick(self, counter: int) -> bool:
        """Look at every connection now and then, also while there is nothing to do but to wait."""
        if counter % self.look_ticks == 0:
            now = asyncio.get_running_loop().time()
            for connection in cast("list[Connection]", list(self.server_state.connections)):
                connection.look(now)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            announce(f"refitd ready on http://{self.config.host}:{port}")
