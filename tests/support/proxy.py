"""A proxy that does to HTTP what networks do: it cuts, delays, repeats, exchanges and mangles, on command.

It speaks TCP and finds the ends of messages, nothing more, so that whatever a client makes of it is the client's own
doing. A fault is planned for the next request to a path, and so happens at that call and at no other:

    with Proxy(engine.port) as proxy:
        proxy.plan("/update_weights_from_disk", Fault.LOST_REPLY)
"""

import json
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, BinaryIO, Self

PATIENCE = 60.0  # seconds after which what a test waits for is taken not to come
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of a farewell


class Fault(Enum):
    """What can happen to one call."""

    CUT_REQUEST = auto()  # nothing of it gets through
    HALF_REQUEST = auto()  # half of it gets through
    LOST_REPLY = auto()  # it is carried out, and nobody hears of it
    HALF_REPLY = auto()  # it is carried out, and half of the answer gets through
    GARBAGE = auto()  # it is carried out, and the answer is no HTTP
    TWICE = auto()  # the answer comes twice, in one piece
    SWAPPED = auto()  # the answer goes to whoever is swapped as well, and the other's comes here


@dataclass(frozen=True)
class Replaced:
    """A call that is carried out, and answered with something else than what the server said."""

    status: int
    body: dict[str, Any]

    @property
    def reply(self) -> bytes:
        """The other answer."""
        body = json.dumps(self.body).encode()
        return b"HTTP/1.1 %d Other\r\nContent-Length: %d\r\n\r\n%b" % (self.status, len(body), body)


@dataclass(eq=False)
class Hold:
    """A call that is held: before it is passed on or, with `reply`, after it was carried out. Let it go with `release`.

    `arrived` is set when it is held, `passed` when it was let go and, as far as there was anyone to pass it to, passed.
    """

    reply: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)
    _gate: threading.Event = field(default_factory=threading.Event)

    def until_arrived(self) -> None:
        """Wait until the call is held."""
        assert self.arrived.wait(PATIENCE), "the call did not come"

    def release(self) -> None:
        """Let it go on."""
        self._gate.set()

    def until_passed(self) -> None:
        """Let it go on, and wait until it did."""
        self.release()
        assert self.passed.wait(PATIENCE), "the call did not go on"

    def hold(self) -> None:
        """For the proxy: wait for `release`."""
        self.arrived.set()
        self._gate.wait(PATIENCE)


Happening = Fault | Replaced | Hold


class Proxy:
    """Listens on a port of its own and passes everything on to `upstream`, a port on loopback."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.seen: list[str] = []
        self._upstream = upstream
        self._plans: dict[str, deque[Happening]] = defaultdict(deque)
        self._standing: dict[str, float] = {}
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._exchange = threading.Barrier(2)
        self._swapped: dict[int, bytes] = {}
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, path: str, *faults: Happening) -> None:
        """What happens to the coming requests to `path`, one each."""
        with self._changed:
            self._plans[path].extend(faults)

    def slow(self, path: str, seconds: float) -> None:
        """Each reply to `path` comes that much later, from now on."""
        self._standing[path] = seconds

    def count(self, path: str) -> int:
        """How often a path was asked for."""
        with self._changed:
            return Counter(self.seen)[path]

    def until(self, path: str, count: int) -> None:
        """Wait until a path was asked for so often."""
        with self._changed:
            done = self._changed.wait_for(lambda: Counter(self.seen)[path] >= count, PATIENCE)
        assert done, f"{path} was asked for {self.count(path)} times"

    def until_done(self, path: str) -> None:
        """Wait until what was planned for a path has begun to happen."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._plans[path], PATIENCE), f"{path} was not asked for"

    def up(self) -> None:
        """Listen, on the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False, backlog=512)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and reset those that there are."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        for plans in self._plans.values():
            for fault in plans:
                if isinstance(fault, Hold):
                    fault.release()
        self.down()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection of a client's, with one of its own to the server."""
        with ExitStack() as closing, suppress(OSError, ValueError):
            closing.enter_context(client)
            self._connections.add(client)
            closing.callback(self._connections.discard, client)
            server = closing.enter_context(socket.create_connection(("127.0.0.1", self._upstream)))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests = closing.enter_context(client.makefile("rb"))
            replies = closing.enter_context(server.makefile("rb"))
            while request := b"".join(_pieces(requests)):
                self._pass(request, client, server, replies)

    def _pass(self, request: bytes, client: socket.socket, server: socket.socket, replies: BinaryIO) -> None:
        path = request.split(b" ", 2)[1].split(b"?")[0].decode()
        fault = self._next(path)
        if isinstance(fault, Hold) and not fault.reply:
            fault.hold()
        if fault is Fault.CUT_REQUEST:
            _reset(client)
        if fault is Fault.HALF_REQUEST:
            server.sendall(request[: len(request) // 2])
            _reset(client)
        server.sendall(request)
        if fault is None and path not in self._standing:
            for piece in _pieces(replies):
                client.sendall(piece)
            return
        reply = b"".join(_pieces(replies))
        if isinstance(fault, Hold):
            if fault.reply:
                fault.hold()
            fault.passed.set()
        if path in self._standing:
            threading.Event().wait(self._standing[path])
        self._answer(fault, reply, client)

    def _answer(self, fault: Happening | None, reply: bytes, client: socket.socket) -> None:
        match fault:
            case Fault.LOST_REPLY:
                _reset(client)
            case Fault.HALF_REPLY:
                client.sendall(reply[: len(reply) - 8])
                _reset(client)
            case Fault.GARBAGE:
                client.sendall(b"\x00\xff SSH-2.0-what\r\n\r\n" + b"{" * 100)
                _reset(client)
            case Fault.TWICE:
                client.sendall(reply + reply)
            case Replaced():
                client.sendall(fault.reply)
            case Fault.SWAPPED:
                client.sendall(self._others(reply))
            case _:
                client.sendall(reply)

    def _others(self, reply: bytes) -> bytes:
        """Give a reply away for that of the other thread that comes here."""
        mine = self._exchange.wait(PATIENCE)
        self._swapped[mine] = reply
        self._exchange.wait(PATIENCE)
        return self._swapped[1 - mine]

    def _next(self, path: str) -> Happening | None:
        with self._changed:
            self.seen.append(path)
            fault = self._plans[path].popleft() if self._plans[path] else None
            self._changed.notify_all()
            return fault


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """One message as it comes: its head, then its body. Nothing where the connection has ended."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return
        head += line
    yield head
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        yield stream.read(int(fields.get(b"content-length", b"0")))
        return
    while (line := stream.readline()) and int(line, 16):
        yield line + stream.read(int(line, 16) + 2)
    yield line + stream.readline()


def _reset(client: socket.socket) -> None:
    """End a connection as a firewall does. Raises what ends its thread."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    client.close()
    raise ConnectionAbortedError
