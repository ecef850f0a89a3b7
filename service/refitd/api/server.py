"""uvicorn with limits on what a connection may ask, for the service and the facades; and the service's own, which
serves until SIGTERM or SIGINT and leaves the rest of the shutdown to the service.
"""

import asyncio
import signal
from collections.abc import Collection, Generator
from contextlib import contextmanager
from socket import socket
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from refitd.api.auth import HEALTH
from refitd.api.connection import Connection, Patience, protocol
from refitd.observe.logs import announce

PATIENCE = Patience()
CLOSE_SECONDS = 2  # what an open event stream gets when the service stops


class BoundedServer(uvicorn.Server):
    """Gives clients what `patience` allows them, and looks at every connection once a second."""

    look_ticks = 10  # uvicorn ticks ten times a second
    close_seconds = CLOSE_SECONDS

    def __init__(self, app: ASGIApp, host: str, port: int, *, patience: Patience, health: Collection[str]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=self.close_seconds,
                timeout_keep_alive=patience.idle,  # pyright: ignore[reportArgumentType] - it goes to call_later
                http=protocol(patience, health),
                ws="none",
            )
        )

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
            self.listens(f"http://{self.config.host}:{port}")

    def listens(self, url: str) -> None:
        """Called when it listens."""
        raise NotImplementedError


class Server(BoundedServer):
    """The service's. Says on stdout when it listens, with the port that it got."""

    def __init__(self, api: ASGIApp, host: str, port: int, patience: Patience = PATIENCE) -> None:
        super().__init__(api, host, port, patience=patience, health=HEALTH)

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

    def listens(self, url: str) -> None:
        """Say where."""
        announce(f"refitd ready on {url}")
