"""The server: uvicorn with limits on connections, for the service and the front, and the service's own.

The service takes its address before anything else happens (`listening`): one without an address touches nothing. Its
server runs until SIGTERM or SIGINT and leaves the rest of the shutdown to the service.
"""

import asyncio
import errno
import signal
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from socket import (
    AF_INET6,
    AI_PASSIVE,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    SO_REUSEADDR,
    SOCK_STREAM,
    SOL_SOCKET,
    getaddrinfo,
)
from socket import socket as Socket  # noqa: N812 - it is a class
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from refitd.api.auth import HEALTH
from refitd.api.connection import ClientConnection, Patience, protocol
from refitd.api.options import ServerTls, TlsFiles
from refitd.observe.logs import announce
from refitd.root.ownership import StartRefusedError

# Of a name's addresses, such as ::1 of localhost, a machine need not have all.
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})

PATIENCE = Patience()
CLOSE_SECONDS = 2  # what an open event stream gets when the service stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The sockets that a service listens on, and its certificate; without one it speaks plain HTTP."""

    sockets: list[Socket]
    tls: ServerTls | None = None

    @property
    def port(self) -> int:
        return int(self.sockets[0].getsockname()[1])


def server_tls(files: TlsFiles | None) -> ServerTls | None:
    """Read the files for TLS; None where there are none to be.

    Raises:
        StartRefusedError: one cannot be used.
    """
    try:
        return None if files is None else ServerTls(files)
    except ValueError as error:
        raise StartRefusedError(str(error)) from error


@contextmanager
def listening(host: str, port: int) -> Generator[list[Socket]]:
    """Hold the address as long as the context lasts. Clients can connect when a server has taken the sockets over.

    Raises:
        StartRefusedError: it cannot be had.
    """
    with ExitStack() as opened:
        try:
            sockets = _sockets(host, port, opened)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartRefusedError(f"port {port} on {host} is taken: choose another with --port") from error
            why = f"port {port} on {host} cannot be had ({error.strerror})"
            raise StartRefusedError(f"{why}: choose others with --host and --port") from error
        yield sockets


def _sockets(host: str, port: int, opened: ExitStack) -> list[Socket]:
    sockets: list[Socket] = []
    absent: OSError | None = None
    for family, kind, number, _, address in getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE):
        try:
            listener = opened.enter_context(Socket(family, kind, number))
            listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            if family == AF_INET6:
                listener.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1)
            listener.bind(address)
            sockets.append(listener)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error
    if not sockets and absent is not None:
        raise absent
    return sockets


class BoundedServer(uvicorn.Server):
    """Gives clients what `patience` allows them, and looks at every connection once a second."""

    look_ticks = 10  # uvicorn ticks ten times a second
    close_seconds = CLOSE_SECONDS

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        patience: Patience,
        health: Collection[str],
        tls: ServerTls | None = None,
    ) -> None:
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
        self.config.load()
        self.config.ssl = None if tls is None else tls.context

    async def on_tick(self, counter: int) -> bool:
        """Look at every connection once a second, also while nothing happens."""
        if counter % self.look_ticks == 0:
            now = asyncio.get_running_loop().time()
            for connection in cast("list[ClientConnection]", list(self.server_state.connections)):
                connection.look(now)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[Socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            scheme = "http" if self.config.ssl is None else "https"
            self.listens(f"{scheme}://{self.config.host}:{port}")

    def listens(self, url: str) -> None:
        raise NotImplementedError  # each server that is made of it prints that in its own way


class Server(BoundedServer):
    """The service's. Says on stdout when it listens, with the port that it got."""

    def __init__(
        self, api: ASGIApp, host: str, port: int, patience: Patience = PATIENCE, tls: ServerTls | None = None
    ) -> None:
        super().__init__(api, host, port, patience=patience, health=HEALTH, tls=tls)

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
        announce(f"refitd ready on {url}")
