"""A service on a real port, in this process, and a client that says what no HTTP library would say."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import ASGIApp

from refitd.api.connection import ClientConnection
from refitd.api.server import PATIENCE, Server
from refitd_client.contract.wire import Problem

GIVE_UP = 15.0  # seconds after which a test fails; nothing here takes them


class QuietServer(Server):
    """The service's server, without its signals, which are pytest's here. It looks at connections at each tick."""

    look_ticks = 1

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]

    @property
    def connections(self) -> list[ClientConnection]:
        return [each for each in self.server_state.connections if isinstance(each, ClientConnection)]

    async def until_connections(self, count: int) -> None:
        """Wait until there are so many."""
        async with asyncio.timeout(GIVE_UP):
            while len(self.connections) != count:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(
    api: ASGIApp, port: int = 0, within: float = 4 * GIVE_UP, **patience: Any
) -> AsyncIterator[QuietServer]:
    """Serve on loopback with this patience, for `within` seconds at most."""
    server = QuietServer(api, "127.0.0.1", port, replace(PATIENCE, **patience))
    async with asyncio.timeout(within), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        try:
            while not server.started:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.01)
            yield server
        finally:
            # It ends before the group hears of a test that failed: one that is cancelled leaves its socket open.
            server.should_exit = True
            await serving


@dataclass
class Attacker:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send it, or notice that the other side has hung up."""
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def drip(self, byte: bytes = b"a", every: float = 0.02) -> bytes:
        """Send a byte again and again until the service has had enough; return what it said."""
        dripping = asyncio.ensure_future(self._drip(byte, every))
        try:
            return await self.read()
        finally:
            dripping.cancel()

    async def _drip(self, byte: bytes, every: float) -> None:
        while True:
            await self.send(byte)
            await asyncio.sleep(every)

    async def read(self) -> bytes:
        """All that comes until the service closes the connection."""
        said = b""
        async with asyncio.timeout(GIVE_UP):
            with contextlib.suppress(ConnectionError):
                while data := await self.reader.read(65536):
                    said += data
        return said

    async def refused(self) -> Problem:
        """The problem document with which the service closes the connection."""
        return problem_in(await self.read())


@asynccontextmanager
async def attacking(server: QuietServer, *, window: int | None = None) -> AsyncIterator[Attacker]:
    """Connect. `window` is the size of the receive buffer in bytes: a small one makes for a slow reader."""
    end = socket.socket()
    if window is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=end, limit=1024)
    try:
        yield Attacker(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def other_spellings(route: str) -> list[str]:
    """Targets that some program on the way may take for this route, which is written without its slash."""
    return [
        *(f"/./{route}", f"/x/../{route}", f"/%2e/{route}", f"/x/%2e%2e/{route}", f"/x/..%2f{route}", f"/{route}/."),
        *(f"//{route}", f"/\\{route}", f"/x\\..\\{route}", f"/%5c{route}", f"/%{ord(route[0]):x}{route[1:]}"),
        *(f"/{route}/", f"/{route};x", f"/{route}#x", f"http:/{route}", route, f"generate/../{route}"),
        *(f"http://127.0.0.1/{route}", f"http://127.0.0.1:1/./{route}"),
        *(f"/v1/../{route}", f"/v1/%2e%2e/{route}", f"/generate/../{route}", f"/generate//../{route}"),
    ]


def problem_in(said: bytes) -> Problem:
    """The problem document of an answer, which says it is one."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, said
    return msgspec.json.decode(body, type=Problem)
