"""Limits on what a request may send, before anything of it is parsed. uvicorn has none of its own.

A body is read whole before a route is called: one that is too large or no JSON, or whose client went away in the
middle, never reaches a route. `connection.py` limits the time that a client may take over this.
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refitd.api.auth import KNOWN_BY
from refitd.api.connection import peer_of
from refitd.api.errors import answer
from refitd.memory import BodyMemory
from refitd.problem import ProblemError, Slug
from refitd_client.contract.decoding import TooManyValuesError, plain_json

MAX_BODY_BYTES = 2**20
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEADERS = 100
MAX_LENGTH_DIGITS = 20  # as h11
MOST_VALUES = 50_000  # of a body: a fleet's engines, thrice


class RequestLimit:
    """ASGI middleware that refuses heads and bodies beyond the limits, by what they declare or while they come in.

    Args:
        app: what is behind it.
        most: bytes of a body.
        is_read: whether a route reads the body as JSON; what is only passed on is not parsed here.
        memory: what all bodies may take together, None where the number of connections is limit enough.
    """

    def __init__(
        self, app: ASGIApp, *, most: int = MAX_BODY_BYTES, is_read: bool = True, memory: BodyMemory | None = None
    ) -> None:
        self._app = app
        self._most = most
        self._is_read = is_read
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or answer 413 or 431."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = _BodySize(self._most, self._memory)
        try:
            body = await self._taken_in(scope, receive, send, taken)
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
        finally:
            taken.give_back()

    async def _taken_in(self, scope: Scope, receive: Receive, send: Send, taken: "_BodySize") -> bytes | None:
        """Read the body; None where the request has been answered, or its client went away before the body's end."""
        try:
            _check_head(scope)
            body = await _body(scope, receive, taken)
            if self._is_read:
                _check_json(body or b"")
        except ProblemError as problem:
            await answer(problem, scope)(scope, receive, send)
            return None
        return body


class _BodySize:
    """The bytes of one body, counted against its limit and against the memory for all bodies."""

    def __init__(self, most: int, memory: BodyMemory | None) -> None:
        self._most = most
        self._memory = memory
        self._size = 0

    def check(self, size: int) -> None:
        if size > self._most:
            raise ProblemError(Slug.TOO_LARGE, f"a request body has at most {self._most} bytes")

    def grow(self, size: int) -> None:
        """Count more bytes, or refuse the request."""
        self._size += size
        has_room = self._memory is None or self._memory.take(size)
        self.check(self._size)
        if self._memory is not None and not has_room:
            detail = f"the bodies of all requests have {self._memory.most} bytes together: try again"
            raise ProblemError(Slug.TOO_MANY, detail, {"Retry-After": "1"})

    def give_back(self) -> None:
        if self._memory is not None:
            self._memory.give_back(self._size)


def _check_head(scope: Scope) -> None:
    headers = scope["headers"]
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        raise ProblemError(
            Slug.HEAD_TOO_LARGE,
            f"address and headers have at most {MAX_HEAD_BYTES} bytes, in {MAX_HEADERS} headers",
        )


async def _body(scope: Scope, receive: Receive, taken: _BodySize) -> bytes | None:
    """Read the body; None where the client went away before its end."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if not chunked and not any(value.strip(b"0") for value in lengths):
        return b""
    # Python refuses to read a number of 4,301 digits, by a ValueError.
    taken.check(max((int(value[:MAX_LENGTH_DIGITS]) for value in lengths if value.isdigit()), default=0))
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        taken.grow(len(part))
        body += part
        more = message.get("more_body", False)
    return bytes(body)


def _check_json(body: bytes) -> None:
    """Refuse what is not JSON (RFC 8259), or many values.

    Python's own parser accepts NaN, UTF-16 and halves of surrogate pairs, which no answer and no journal can hold.
    """
    try:
        if body:
            plain_json(body, MOST_VALUES)
    except TooManyValuesError as error:
        raise ProblemError(Slug.TOO_LARGE, f"a request body has at most {MOST_VALUES} values") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(Slug.BAD_REQUEST, f"the body is no JSON: {error}") from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body once, and then what comes: the end of the connection."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSlots:
    """How many requests may wait: in all, from one peer, and by one client of a peer (`ConnectionSlots` are more)."""

    all: int = 256
    peer: int = 96
    client: int = 64


class WaitingRequests:
    """Counts the requests that wait for news: long polls and event streams.

    Each holds a connection for as long as its client likes. They are counted in all, from one peer, and by one client.
    A peer has more connections than may wait, so that those who share its address can always ask for something, and a
    client with a token has places that one without cannot take. Beyond the count the answer is 503 with Retry-After.
    """

    def __init__(self) -> None:
        self.slots = WaitSlots()
        self._held: list[tuple[str, bytes]] = []

    @property
    def count(self) -> int:
        return len(self._held)

    @contextmanager
    def slot(self, request: Request) -> Generator[None]:
        """Hold one of the places. The client is the token that the request came with, else its peer.

        Raises:
            ProblemError: all that it may have are taken.
        """
        peer = peer_of(None if request.client is None else (request.client.host, request.client.port))
        client = (peer, request.scope.get(KNOWN_BY, b""))
        own = sum(each == client for each in self._held)
        neighbours = sum(each[0] == peer for each in self._held)
        if own >= self.slots.client or neighbours >= self.slots.peer or self.count >= self.slots.all:
            detail = (
                f"{self.count} requests wait for news, {own} of them this client's, and the service takes no more: "
                "close one, or ask again"
            )
            raise ProblemError(Slug.TOO_MANY, detail, {"Retry-After": "1"})
        self._held.append(client)
        try:
            yield
        finally:
            self._held.remove(client)


async def stream_slot(request: Request) -> AsyncGenerator[None]:
    """Hold one of the places as long as the request lasts.

    Raises:
        ProblemError: as `WaitingRequests.slot`.
    """
    waiting: WaitingRequests = request.app.state.waiting
    with waiting.slot(request):
        yield
