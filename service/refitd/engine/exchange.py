"""One request and its answer over a connection of its own, by HTTP/1.1.

A service with many engines does little else than call them. httpcore's connection, its streams and their locks take
more than half of what a call costs, so bytes go from asyncio's transport straight to h11, the parser that httpcore
has. No connection is used twice, no answer is decompressed, and no redirect is followed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import h11

_MAX_HEAD_BYTES = 2**16


class UnsendableError(ValueError):
    """The request is none in HTTP/1.1, so nothing was sent. The message quotes nothing: a part of it may be a key."""


class NotHttpError(ValueError):
    """What the server sent is no whole answer in HTTP/1.1."""


class TooLargeError(Exception):
    """The answer's body is larger than wanted."""


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


class Exchange(asyncio.Protocol):
    """Sends a request as soon as there is a connection, and reads the answer."""

    def __init__(self, request: Request, limit: int) -> None:
        """Make the request's bytes.

        Args:
            request: what to send.
            limit: bytes that the answer's body has at most.

        Raises:
            UnsendableError: it is no request.
        """
        self._limit = limit
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._bytes = self._encoded(request)
        self._answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._head: h11.Response | None = None
        self._body = bytearray()

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

    async def answer(self) -> HttpAnswer:
        """Wait for the answer.

        Raises:
            NotHttpError, TooLargeError: what came is no whole answer, or too much.
            OSError: the connection broke off.
        """
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        cast("asyncio.WriteTransport", transport).write(self._bytes)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio. An answer without a length ends here; any other one has broken off."""
        if exc is None:
            self._read(b"")
        if not self._answer.done():
            self._fail(exc or NotHttpError("it closed the connection before its answer was whole"))

    def _read(self, data: bytes) -> None:
        if self._answer.done():
            return
        try:
            self._http.receive_data(data)
            while not self._answer.done():
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return
                self._take(cast("h11.Event", event))
        except h11.RemoteProtocolError as error:
            self._fail(NotHttpError(str(error)))
        except TooLargeError as error:
            self._fail(error)

    def _take(self, event: h11.Event) -> None:
        match event:
            case h11.Response():
                self._head = event
            case h11.Data(data=data):
                self._body += data
                if len(self._body) > self._limit:
                    raise TooLargeError
            case h11.EndOfMessage() if self._head is not None:
                headers = dict(reversed(list(self._head.headers)))
                self._answer.set_result(HttpAnswer(self._head.status_code, headers, bytes(self._body)))
            case _:  # a status below 200, which announces another one
                pass

    def _fail(self, error: Exception) -> None:
        self._answer.set_exception(error)
        self._answer.exception()  # it is an error for the task that waits for the answer, and for no other
