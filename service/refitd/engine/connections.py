"""A connection to one server, of one call: what is sent and received, in the clear or by TLS.

In the clear it is a socket that the event loop waits for. asyncio's own transports refer to themselves, so each of them
waits for the garbage collector: after the 5,000 calls of an update of a thousand engines it freed 35,000 objects, which
kept everything else waiting for 80 ms.
"""

import asyncio
import socket
import ssl
from ipaddress import IPv6Address
from typing import Any, Protocol

from refitd.engine.address import Address

_READ_AT_ONCE = 2**16  # bytes


class EngineConnection(Protocol):
    """One connection. Errors of the network are `OSError`s."""

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        ...

    async def receive(self) -> bytes:
        """What comes next; nothing at the end."""
        ...

    def ends(self) -> tuple[Any, Any]:
        """The socket addresses of the other side and of this one.

        Raises:
            OSError: the connection was closed again before they were known.
        """
        ...

    def close(self) -> None:
        """Close it, without waiting for the other side."""
        ...


class PlainConnection:
    """A `EngineConnection` in the clear."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def receive(self) -> bytes:
        return await self._loop.sock_recv(self._socket, _READ_AT_ONCE)

    def ends(self) -> tuple[Any, Any]:
        return self._socket.getpeername(), self._socket.getsockname()

    def close(self) -> None:
        self._socket.close()


class TlsConnection:
    """A `EngineConnection` by TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        return await self._reader.read(_READ_AT_ONCE)

    def ends(self) -> tuple[Any, Any]:
        there = self._writer.get_extra_info("peername")
        if there is None:
            raise OSError("it closed the connection at once")
        return there, self._writer.get_extra_info("sockname")

    def close(self) -> None:
        self._writer.transport.abort()


async def connect_in_the_clear(address: Address, port: int) -> EngineConnection:
    """Connect in the clear.

    Raises:
        OSError: there is no connection.
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(made, (str(address), port))
    except BaseException:
        made.close()
        raise
    return PlainConnection(made)


async def connect_by_tls(address: Address, port: int, context: ssl.SSLContext, name: str) -> EngineConnection:
    """Connect by TLS.

    Args:
        address: of the server.
        port: of the server.
        context: what its certificate is held against.
        name: that its certificate has to have.

    Raises:
        OSError: there is no connection, or no trust.
    """
    return TlsConnection(*await asyncio.open_connection(str(address), port, ssl=context, server_hostname=name))
