"""One HTTP connection, with the deadlines that uvicorn does not have.

A client owes two things: a request that it has begun (slow-loris sends it a byte at a time, or stops in the middle),
and to take the answer that it asked for (one that never reads holds it in memory). Once a second every connection is
asked what its client owes and since when; one that owes too long is cut off.

A connection takes a slot. When a peer has all of its slots, or all slots are taken, the connection that has waited
longest for its client makes room: a client that opens sockets and sends nothing shuts out only itself. Where none
waits, because requests are being answered on all of them, a few slots are left on which only health is answered.
A peer that sends many requests at once may have more than its slots for a moment, while there are others: what came
less than `GRACE` seconds ago is a request on its way, and to close it would lose it.
"""

import asyncio
import os
import select
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from socket import socket
from typing import Any, cast

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from refitd.api.errors import response
from refitd.problem import ProblemError, Slug

PIECE = 8 * 2**20  # bytes that are handed to the kernel at a time
EXTENSION = "http.response.zerocopysend"
_CLOSED_LOOK_SECONDS = 0.5  # how often a thread that waits for its client looks whether the connection is closed
_SENDERS = ThreadPoolExecutor(64, "refitd-send")  # two for each of some thirty followers that pull at a time


class NotSentError(Exception):
    """The rest of a response could not be sent. The connection is to be closed: its client sees that bytes lack."""


async def send_part(
    to: socket, file: int, offset: int, count: int, *, patience: float, is_closed: Callable[[], bool]
) -> None:
    """Send bytes of a file by sendfile(2) in a thread, without copying them through Python.

    Starlette reads files by 64 KiB through the event loop, which takes several times as long. Returns when the
    kernel has taken them all, also if the caller is cancelled meanwhile.

    Args:
        to: the connected socket, which does not block.
        file: a descriptor.
        offset: of the first byte.
        count: how many.
        patience: seconds that the client may take for each `PIECE`, so that none holds a thread for ever.
        is_closed: says, in a thread, whether the connection is closed; then it is given up.

    Raises:
        NotSentError: the client is gone or too slow, or the file has become shorter.
    """
    try:
        own = os.dup(to.fileno())  # the connection may be closed meanwhile, and its number given to another
    except OSError as error:
        raise NotSentError("the connection is closed") from error
    loop = asyncio.get_running_loop()
    sending = loop.run_in_executor(_SENDERS, _send, own, file, offset, count, patience, is_closed)
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait([sending])  # the thread uses the caller's descriptor
        raise
    finally:
        os.close(own)


def _send(to: int, file: int, offset: int, count: int, patience: float, is_closed: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(to, select.POLLOUT)
    until, taken = time.monotonic() + patience, 0  # and what the client has taken of the piece
    try:
        while count:
            try:
                sent = os.sendfile(to, file, offset, min(count, PIECE))
            except BlockingIOError:
                poll.poll(_CLOSED_LOOK_SECONDS * 1000)
                if is_closed() or time.monotonic() >= until:
                    raise NotSentError("its client is gone, or too slow") from None
                continue
            if sent == 0:
                raise NotSentError("the file has become shorter")
            offset, count, taken = offset + sent, count - sent, taken + sent
            if taken >= PIECE:
                until, taken = time.monotonic() + patience, 0
    except OSError as error:
        raise NotSentError(str(error)) from error


GRACE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSlots:
    """How many connections there may be: in all, from one peer, and beyond these for health alone."""

    all: int = 512
    peer: int = 128
    health: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A connection. `waits_since` is when it began to wait for its client (seconds), None while it is answered."""

    key: int
    peer: str
    waits_since: float | None
    health_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of a new connection. `closes` is the key of the connection that makes room for it."""

    is_in: bool = True
    health_only: bool = False
    closes: int | None = None


def admission(peer: str, taken: Iterable[Taken], slots: ConnectionSlots, now: float) -> Admission:
    everything = list(taken)
    ordinary = [each for each in everything if not each.health_only]
    own = [each for each in ordinary if each.peer == peer]
    if len(own) < slots.peer and len(ordinary) < slots.all:
        return Admission()
    is_full = len(ordinary) >= slots.all
    closes = _longest(_makes_room(own, ordinary, slots), until=now if is_full else now - GRACE)
    if closes is not None:
        return Admission(closes=closes)
    if not is_full and _longest(own, until=now) is not None:
        return Admission()
    spare = [each for each in everything if each.health_only]
    if len(spare) < slots.health:
        return Admission(health_only=True)
    closes = _longest(spare, until=now)
    return Admission(is_in=closes is not None, health_only=True, closes=closes)


def peer_of(client: tuple[str, int] | None) -> str:
    """Return the peer of an address: the machine itself, an IPv4 address or an IPv6 network of 64 bits."""
    try:
        address = ip_address((client[0] if client is not None else "").partition("%")[0])
    except ValueError:
        return "local"  # a Unix socket
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "local"
    return str(address) if address.version == 4 else str(int(address) >> 64)


def _makes_room(own: Sequence[Taken], ordinary: Sequence[Taken], slots: ConnectionSlots) -> Sequence[Taken]:
    """Return those of which one makes room: the peer's own, else those of peers over their slots, else all."""
    if len(own) >= slots.peer:
        return own
    held = Counter(each.peer for each in ordinary)
    return [each for each in ordinary if held[each.peer] > slots.peer] or ordinary


def _longest(taken: Sequence[Taken], *, until: float) -> int | None:
    """Return the key of the one that has waited longest, of those that began to wait no later than `until`."""
    waiting = [(each.waits_since, each.key) for each in taken if each.waits_since is not None]
    longest = min(waiting, default=None)
    return None if longest is None or longest[0] > until else longest[1]


_TOO_MANY = ProblemError(
    Slug.TOO_MANY, "there are as many connections as the server takes: try again", {"Retry-After": "1"}
)
_TWO_LENGTHS = ProblemError(
    Slug.BAD_REQUEST, "a request has either Transfer-Encoding or Content-Length: where its body ends is not certain"
)
_NO_CERTIFICATE = ProblemError(
    Slug.NO_CERTIFICATE,
    "this service answers clients with a certificate alone (--tls-client-ca): name one in REFITD_CLIENT_CERT and "
    "REFITD_CLIENT_KEY",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much a client may ask of the service. Times are seconds.

    Attributes:
        request: for a whole request, head and body, from its first byte or the connection's beginning.
        reading: in which something that was sent may lie unread.
        idle: between two requests.
        slots: how many connections there may be. A process has 1024 file descriptors by default.
    """

    request: float = 20.0
    reading: float = 60.0
    idle: float = 15.0
    slots: ConnectionSlots = field(default_factory=ConnectionSlots)


class ClientConnection(H11Protocol):
    """uvicorn's HTTP/1.1, with deadlines, and a problem document where it has plain text."""

    patience = Patience()
    health: Collection[str] = ()
    health_only = False
    peer = ""
    _request_since: float | None = None
    _idle_since: float | None = None
    _unread_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, for health alone where there is no other slot, or turn it away."""
        super().connection_made(transport)
        tls = transport.get_extra_info("sslcontext")
        if tls is None:
            self.app = self._sending_files(self.app)
        elif tls.verify_mode is not ssl.CERT_NONE and not transport.get_extra_info("peercert"):
            self.app = _only(self.health, self.app, _NO_CERTIFICATE)
        self.app = _of_one_length(self.app)
        self._request_since, self.peer = self.loop.time(), peer_of(self.client)
        others = {id(each): each for each in cast("set[ClientConnection]", self.connections) if each.is_open}
        del others[id(self)]
        taken = [each.taken for each in others.values()]
        found = admission(self.peer, taken, self.patience.slots, self._request_since)
        if found.closes is not None:
            others[found.closes].make_room()
        if not found.is_in:
            self.make_room()
        elif found.health_only:
            self.health_only, self.app = True, _only(self.health, self.app, _TOO_MANY)

    def _sending_files(self, inner: ASGIApp) -> ASGIApp:
        """The application, to which the scope names an extension by which it can have the kernel send files."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_or_part(message: Message) -> None:
                if message["type"] != EXTENSION:
                    await send(message)
                    return
                await self._send_part(message)
                if not message.get("more_body", False):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

            scope.setdefault("extensions", {})[EXTENSION] = {}
            await inner(scope, receive, send_or_part)

        return app

    async def _send_part(self, message: Message) -> None:
        """Send a part of a file behind what was sent. Where that fails, the connection is cut."""
        count = message["count"]
        if not count or self.transport.is_closing():
            return
        self.conn.send_with_data_passthrough(h11.Data(data=_Counted(count)))  # h11 counts the body's bytes
        try:
            self.transport.set_write_buffer_limits(0)
            await self.flow.drain()  # the head is on its way before the kernel sends behind it
            await send_part(
                self.transport.get_extra_info("socket"),
                message["file"],
                message["offset"],
                count,
                patience=self.patience.reading,
                is_closed=self.transport.is_closing,
            )
        except NotSentError:
            self.transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether it takes a slot: it is not being closed."""
        return not self.transport.is_closing()

    @property
    def taken(self) -> Taken:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        waits_since = self._request_since
        if waits_since is None and (cycle is None or cycle.response_complete):
            waits_since = self._idle_since
        return Taken(key=id(self), peer=self.peer, waits_since=waits_since, health_only=self.health_only)

    def make_room(self) -> None:
        """End it because there are too many connections.

        Between two requests it closes without a word, which its client would take for the answer to the next.
        """
        if self._request_since is None:
            self.transport.close()
        else:
            self._say(_TOO_MANY)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request that begins, goes on, or is complete with them."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._request_since = None
        elif self._request_since is None:
            self._request_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Go on to the next request, of which a part may be here already."""
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY and self._request_since is None:
            self._request_since = self.loop.time()

    def shutdown(self) -> None:
        """Begin to close. Streams are ended, which their readers resume; other answers are waited for."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or not cycle.response_started:
            super().shutdown()
        elif self.transport.get_write_buffer_size() > 0:
            self.transport.abort()  # its client does not read: there is nothing to wait for
        else:
            self._leave(cycle)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP/1.1, or has a head beyond h11's limit of 16 KiB."""
        del msg
        self._say(ProblemError(Slug.BAD_REQUEST, "this is no HTTP/1.1, or its head is larger than 16 KiB"))

    def look(self, now: float) -> None:
        """Cut the connection if its client owes something for too long. Called once a second."""
        unread = self.transport.get_write_buffer_size() > 0
        self._unread_since = (self._unread_since or now) if unread else None
        if self._unread_since is not None and now - self._unread_since >= self.patience.reading:
            self.transport.abort()
        elif self._request_since is not None and now - self._request_since >= self.patience.request:
            self._request_since = None
            self._say(ProblemError(Slug.TOO_SLOW, f"a request has {self.patience.request:g} s to arrive in whole"))

    def _say(self, problem: ProblemError) -> None:
        """Answer without the application, where no answer has begun, and close."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            self._leave(cycle)
        if not self.transport.is_closing() and self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.write(self._answer(problem))
        self.transport.close()

    def _leave(self, cycle: RequestResponseCycle) -> None:
        """Tell the application that its client is gone; what it sends from here on is dropped."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _answer(self, problem: ProblemError) -> bytes:
        body = msgspec.json.encode(problem.document())
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in problem.headers.items()),
        ]
        status = problem.kind.status
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        return b"".join(self.conn.send(part) for part in (head, h11.Data(data=body), h11.EndOfMessage()))


class _Counted(bytes):
    """Bytes of a body that the kernel sends: h11 asks for their number alone."""

    size: int

    def __new__(cls, size: int) -> "_Counted":
        new = super().__new__(cls)
        new.size = size
        return new

    def __len__(self) -> int:
        return self.size


def protocol(patience: Patience, health: Collection[str]) -> type[ClientConnection]:
    """Return the class of connections with this patience; uvicorn makes them.

    Args:
        patience: what a client may ask of the server.
        health: the paths that are answered also where all slots are taken.
    """
    return type("ClientConnection", (ClientConnection,), {"patience": patience, "health": health})


def _only(paths: Collection[str], app: ASGIApp, otherwise: ProblemError) -> ASGIApp:
    """An application that answers these paths alone, and closes the connection behind each answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        inner: ASGIApp = app if scope["path"] in paths else response(otherwise, scope["path"])
        await inner(scope, receive, _closing(send))

    return answer


def _of_one_length(app: ASGIApp) -> ASGIApp:
    """An application that no request reaches of which a proxy may see another end than h11 does (RFC 9112, 6.1)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            await response(_TWO_LENGTHS, scope["path"])(scope, receive, _closing(send))
        else:
            await app(scope, receive, send)

    return answer


def _closing(send: Send) -> Send:
    """Close the connection behind the answer."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close
