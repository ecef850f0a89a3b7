"""Connections to engines, and a check of each address before it is called.

A name can have one address when it is checked and another when it is called (DNS rebinding). So `dial` resolves it
right before the connection, and connects to the address that was checked, not to the name.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

from refitd.engine.address import Address, literal
from refitd_client.http.tls import why_refused

Guard = Callable[[str, Address | None], str | None]
"""Why a host may not be called at one of its addresses, None where it may."""
Resolve = Callable[[str], Awaitable[list[Address]]]
ConnectedT = TypeVar("ConnectedT")
Connect = Callable[[Address], Awaitable[ConnectedT]]
"""Connects to one address; raises `OSError`."""


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


class NotConnectedError(Exception):
    """There is no connection, so nothing was sent. The message says why.

    Attributes:
        numbers: the system's error numbers, of each address that was called.
    """

    def __init__(self, reason: str, numbers: frozenset[int] = frozenset()) -> None:
        super().__init__(reason)
        self.numbers = numbers

    @property
    def nothing_listens(self) -> bool:
        """Every address that was called has refused the connection."""
        return self.numbers == frozenset({errno.ECONNREFUSED})


async def dial(host: str, guard: Guard | None, connect: Connect[ConnectedT], resolve: Resolve = resolve) -> ConnectedT:
    """Connect to the first address of a host that the guard lets pass and that answers. Deadlines are the caller's.

    Args:
        host: a name or an address.
        guard: says which addresses may be called. None: all.
        connect: connects to one of them.
        resolve: finds the addresses of a name.

    Raises:
        NotConnectedError: there is none; where the guard let none pass the message names the setting.
    """
    trouble, numbers = f"{host} has no address: the name cannot be resolved", set[int]()
    for address in await resolve(host):
        if guard is not None and (reason := guard(host, address)) is not None:
            trouble = reason
            continue
        try:
            return await connect(address)
        except ssl.SSLError as error:  # such as a certificate that is not trusted
            raise NotConnectedError(why_refused(error) or str(error)) from error
        except OSError as error:
            numbers.add(error.errno or 0)
            trouble = os.strerror(error.errno).lower() if error.errno else str(error)
    raise NotConnectedError(trouble, frozenset(numbers))
