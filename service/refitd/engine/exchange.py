"""One request and its answer over a connection of its own, by HTTP/1.1.

A service with many engines does little else than call them. httpcore's connection, its streams and their locks take
more than half of what a call costs, so bytes go from the connection straight to h11, the parser that httpcore has. No
connection is used twice, no answer is decompressed, and no redirect is followed.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import h11

from refitd.memory import BodyMemory

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
    """An answer: its status, its body, and the first of each of its headers by name in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Exchange:
    """A request's bytes, and what the bytes that come back say.

    Attributes:
        request: what to send.
    """

    def __init__(self, request: Request, limit: int, memory: BodyMemory | None = None) -> None:
        """Make the request's bytes.

        Args:
            request: what to send.
            limit: bytes that the answer's body has at most.
            memory: what the bodies of all answers that are coming in may take together. Those of a usual size always
                have room, so that nobody keeps out others by large ones.

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
                        headers = dict(reversed(list(self._head.headers)))
                        return HttpAnswer(self._head.status_code, headers, bytes(self._body))
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
