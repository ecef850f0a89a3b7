"""Calls to engines go to addresses that were checked, and to no others.

A name can have one address when it is checked and another when it is called (DNS rebinding). So it is resolved here,
right before the connection, and the connection goes to the address that was looked at, not to the name.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpcore

from refitd.engine.allow import Address, literal
from refitd.engine.sockets import SocketOptions, Sockets

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
