"""asyncio's own streams as httpcore's network: a third of what a call costs is saved against its portable backend.

Deadlines are the caller's (`asyncio.timeout` around the whole call), so those of httpcore are not looked at.
"""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

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
