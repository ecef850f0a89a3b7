"""The way to a server: an address that may be called, a connection, and one request with its answer by HTTP/1.1.

address     A name can have one address when it is checked and another when it is called (DNS rebinding). So `dial`
            resolves it right before the connection, and connects to the address that was checked, not to the name.
connection  In the clear it is a socket that the event loop waits for. asyncio's own transports refer to themselves, so
            each waits for the garbage collector: after the 5,000 calls of an update of a thousand engines it freed
            35,000 objects, which kept everything else waiting for 80 ms.
exchange    A service with many engines does little else than call them. httpcore's connection, its streams and their
            locks take more than half of what a call costs, so bytes go from the connection straight to h11, the parser
            that httpcore has. No connection is used twice, no answer is decompressed, and no redirect is followed.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, TypeVar

import h11

from refitd.engine.address import Address, literal
from refitd.memory import BodyMemory
from refitd_client.http.connection import why_refused

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
        return self.numbers == frozenset({errno.ECONNREFUSED})


async def dial(host: str, guard: Guard | None, connect: Connect[ConnectedT], resolve: Resolve = resolve) -> ConnectedT:
    """Connect to the first address of a host that the guard lets pass and that answers. Deadlines are the caller's.
    `guard`: says which addresses may be called. None: all.

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


_READ_AT_ONCE = 2**16  # bytes


class PlainConnection:
    """A connection in the clear. Errors of the network are `OSError`s."""

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


EngineConnection = PlainConnection | TlsConnection


async def connect_in_the_clear(address: Address, port: int) -> EngineConnection:
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
    """Connect to a server whose certificate has to have the name; raises `OSError`, also where there is no trust."""
    return TlsConnection(*await asyncio.open_connection(str(address), port, ssl=context, server_hostname=name))


Receive = Callable[[], Awaitable[bytes]]
"""Waits for what comes next over a connection; nothing at its end."""

_MAX_HEAD_BYTES = 2**16
USUAL_BYTES = 2**16  # of a body
_MAX_EVENTS = 10_000  # of an answer: h11 takes 20 µs for each, and a chunk or a 100 Continue may be a few bytes


class UnsendableError(ValueError):
    """The request is none in HTTP/1.1, so nothing was sent. The message quotes nothing: a part of it may be a key."""


class NotHttpError(ValueError):
    """What the server sent is no whole answer in HTTP/1.1."""


class TooLargeError(Exception):
    """The answer's body is larger than wanted, or the answer is in too many pieces. The message is a sentence's end."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its method, its target (path and query), its headers with `Host` among them, and its body."""

    method: str
    target: bytes
    headers: Sequence[tuple[str, str]]
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes


class Exchange:
    """A request's bytes, and what the bytes that come back say.

    Attributes:
        request: what to send.
    """

    def __init__(self, request: Request, limit: int, memory: BodyMemory | None = None) -> None:
        """Make the request's bytes. `limit`: bytes that the answer's body has at most. `memory`: what the bodies of all
        answers that are coming in may take together. Those of a usual size always have room, so that no client keeps
        out others by large ones.

        Raises:
            UnsendableError: it is no request.
        """
        self._limit = limit
        self._memory = memory or BodyMemory(most=limit)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self.request = self._encoded(request)
        self._head: h11.Response | None = None
        self._body = bytearray()
        self._events = 0

    def _encoded(self, request: Request) -> bytes:
        headers, parts = list(request.headers), list[h11.Event]()
        if request.body is not None:
            headers.append(("Content-Length", str(len(request.body))))
            parts.append(h11.Data(data=request.body))
        try:
            head = h11.Request(method=request.method, target=request.target, headers=headers)
            return b"".join(self._http.send(part) or b"" for part in (head, *parts, h11.EndOfMessage()))
        except (h11.LocalProtocolError, UnicodeEncodeError):
            raise UnsendableError("its path or its key holds what no request may hold") from None

    async def answer(self, receive: Receive) -> HttpAnswer:
        """Read the answer. The request has been sent.

        Raises:
            NotHttpError, TooLargeError: what came is no whole answer, or too much.
            OSError: the connection broke off.
        """
        try:
            while True:
                data = await receive()
                if (answer := self._read(data)) is not None:
                    return answer
                if not data:
                    raise NotHttpError("it closed the connection before its answer was whole")
        finally:
            self._memory.give_back(len(self._body))

    def _read(self, data: bytes) -> HttpAnswer | None:
        """Take in what has come, nothing at its end: an answer without a length ends there. None: there is more."""
        try:
            self._http.receive_data(data)
            while True:
                self._events += 1
                if self._events > _MAX_EVENTS:
                    raise TooLargeError(f"more than {_MAX_EVENTS} pieces")
                match self._http.next_event():
                    case h11.Response() as head:
                        names = {name for name, _ in head.headers}
                        if {b"content-length", b"transfer-encoding"} <= names:
                            raise NotHttpError("its answer has both Transfer-Encoding and Content-Length")
                        self._head = head
                    case h11.Data(data=part):
                        self._take(part)
                    case h11.EndOfMessage() if self._head is not None:
                        return HttpAnswer(self._head.status_code, bytes(self._body))
                    case h11.InformationalResponse():
                        pass  # it announces another one
                    case _:
                        return None
        except h11.RemoteProtocolError as error:
            raise NotHttpError(str(error)) from error

    def _take(self, part: bytes) -> None:
        self._body += part
        has_room = self._memory.take(len(part))
        if len(self._body) > self._limit:
            raise TooLargeError(f"more than {self._limit} bytes")
        if not has_room and len(self._body) > USUAL_BYTES:
            raise TooLargeError(f"much, and all answers together have more than {self._memory.most} bytes")
