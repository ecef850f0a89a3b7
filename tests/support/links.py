"""A link between two hosts, as networks are: it counts bytes, is slow, damages, exchanges, cuts, stalls or is away.

It knows nothing of HTTP, so faults come in the middle of answers. `passing` sees what the upstream sends, piece by
piece, and says what arrives: other bytes, fewer, later, or none at all (`ConnectionError` cuts the connection).

    with Link(hub.port) as link:
        link.passing = damaged(after=10_000_000)
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

PIECE = 2**18  # bytes that are taken at a time
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of a farewell

Passing = Callable[[bytes], bytes]


class Link:
    """Listens on a port of its own and passes bytes on to `upstream`, a port. Both are on loopback, unless `at` is
    where it listens, or `to` where that port is.

    `down` are the bytes that have come from there, `up` those that went there.
    """

    def __init__(self, upstream: int, *, at: str = "127.0.0.1", to: str = "127.0.0.1") -> None:
        self.port = 0
        self._at, self._to = at, to
        self.down = 0
        self.up = 0
        self.passing: Passing = lambda data: data
        self._upstream = upstream
        self._is_away = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{self._at}:{self.port}"

    def away(self) -> None:
        """Cut all connections, and each new one, until `back`."""
        self._is_away = True
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def back(self) -> None:
        """Pass on again."""
        self._is_away = False

    def __enter__(self) -> Self:
        self._listener = socket.create_server((self._at, self.port), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.away()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        """One connection of a client's, with one of its own to the server."""
        with client, suppress(OSError), socket.create_connection((self._to, self._upstream)) as server:
            if self._is_away:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
            self._open |= {client, server}
            other = threading.Thread(target=self._pass, args=(client, server, self._sent), daemon=True)
            other.start()
            self._pass(server, client, self._came)
            other.join()
            self._open -= {client, server}

    def _sent(self, data: bytes) -> bytes:
        with self._turn:
            self.up += len(data)
        return data

    def _came(self, data: bytes) -> bytes:
        with self._turn:
            self.down += len(data)
        return self.passing(data)

    def _pass(self, source: socket.socket, target: socket.socket, through: Passing) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                target.sendall(through(data))
        for each in (source, target):  # the other direction ends as well, and closes
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _After:
    """Something that happens once, when so many bytes have come over all connections."""

    def __init__(self, after: int, act: Passing) -> None:
        self._left = after
        self._act = act
        self._turn = threading.Lock()
        self.happened = threading.Event()

    def __call__(self, data: bytes) -> bytes:
        with self._turn:
            self._left -= len(data)
            is_now = self._left <= 0 and not self.happened.is_set()
            if is_now:
                self.happened.set()
        return self._act(data) if is_now else data


def damaged(after: int) -> _After:
    """One bit of what passes is another one, in the middle of a piece."""

    def flip(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    return _After(after, flip)


def reordered(after: int) -> _After:
    """The halves of a piece are exchanged."""
    return _After(after, lambda data: data[len(data) // 2 :] + data[: len(data) // 2])


def cut(after: int) -> _After:
    """A connection ends in the middle of a piece."""

    def end(_: bytes) -> bytes:
        raise ConnectionAbortedError

    return _After(after, end)


def slow(bytes_a_second: float) -> Passing:
    """All connections together get so much through."""
    turn = threading.Lock()

    def wait(data: bytes) -> bytes:
        with turn:
            time.sleep(len(data) / bytes_a_second)
        return data

    return wait


class Stalled:
    """From so many bytes on nothing passes on the connections of that moment, until `go_on`; new ones do."""

    def __init__(self, after: int) -> None:
        self.happened = threading.Event()
        self._left = after
        self._gate = threading.Event()
        self._turn = threading.Lock()

    def go_on(self) -> None:
        """Let the bytes through."""
        self._gate.set()

    def __call__(self, data: bytes) -> bytes:
        with self._turn:
            self._left -= len(data)
            is_now = self._left <= 0 and not self.happened.is_set()
            if is_now:
                self.happened.set()
        if is_now:
            self._gate.wait(60)
        return data
