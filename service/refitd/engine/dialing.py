"""Connections to engines: asyncio's streams as httpcore's network, and a check of each address before it is called.

A name can have one address when it is checked and another when it is called (DNS rebinding). So `CheckedNetwork`
resolves it right before the connection, and connects to the address that was checked, not to the name.

asyncio's own streams cost a third less per call than httpcore's portable backend. Deadlines are the caller's
(`asyncio.timeout` around the whole call), so httpcore's are ignored.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore

from refitd.engine.address import Address, literal

SocketOptions = Iterable[Any] | None


class Stream(httpcore.AsyncNetworkStream):
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's
        """See httpcore. Raises `ReadError`."""
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's
        """See httpcore. Raises `WriteError`."""
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        """See httpcore. Does not wait for the other side."""
        self._writer.close()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's
    ) -> httpcore.AsyncNetworkStream:
        """See httpcore. Raises `ConnectError`, as for a certificate that is not trusted."""
        try:
            await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except OSError as error:  # an SSLError is one
            self._writer.close()
            raise httpcore.ConnectError(str(error)) from error
        return self

    def get_extra_info(self, info: str) -> Any:
        """See httpcore."""
        if info == "is_readable":
            return False
        return self._writer.get_extra_info(info)


class Sockets(httpcore.AsyncNetworkBackend):
    """Opens connections."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.AsyncNetworkStream:
        """See httpcore. Raises `ConnectError`."""
        try:
            return Stream(*await asyncio.open_connection(host, port))
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error

    async def sleep(self, seconds: float) -> None:
        """See httpcore."""
        await asyncio.sleep(seconds)


Guard = Callable[[str, Address | None], str | None]
"""Why a host may not be called at one of its addresses, None where it may."""
Resolve = Callable[[str], Awaitable[list[Address]]]


async def resolve(host: str) -> list[Address]:
    """The addresses of a host, in the system's order; none where it has no address now."""
    if (address := literal(host)) is not None:
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [literal(str(entry[4][0])) for entry in found]
    return list(dict.fromkeys(address for address in addresses if address is not None))


async def refused(host: str, guard: Guard, resolve: Resolve = resolve) -> str | None:
    """Why a host may not be an engine: the first of its addresses that may not be called. None where all may."""
    addresses = await resolve(host)
    reasons = [guard(host, address) for address in addresses or [None]]
    return next((reason for reason in reasons if reason is not None), None)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to the first address of a host that the guard lets pass and that answers."""

    def __init__(self, guard: Guard, resolve: Resolve = resolve) -> None:
        self._guard = guard
        self._resolve = resolve
        self._inner: httpcore.AsyncNetworkBackend = Sockets()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.AsyncNetworkStream:
        """See httpcore. `ConnectError` says which address was refused, and by which setting."""
        trouble: Exception = httpcore.ConnectError(f"{host} has no address: the name cannot be resolved")
        for address in await self._resolve(host):
            if (reason := self._guard(host, address)) is not None:
                trouble = httpcore.ConnectError(reason)
                continue
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                trouble = error
        raise trouble

    async def sleep(self, seconds: float) -> None:
        """See httpcore."""
        await asyncio.sleep(seconds)
