"""One deadline for a whole exchange with the service, and a bound on its answer.

httpx knows how long each byte may take to come, and not how long an answer may: a server that sends a byte now and then
would hold a trainer for ever, one whose answer has no end would fill its memory. The deadline of a call that blocks is
in a context variable, which what reads the connection looks at before each read; a call that is awaited is cancelled.
"""

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from ssl import SSLContext
from typing import Any

import httpcore  # httpx brings it
import httpx

MOST_PIECES = 10_000  # of an answer, besides those of a packet's size: each takes 20 µs, and may be of a byte
_PACKET = 1024
# A connection is not used twice: an answer that a proxy on the way repeats would be taken for that of the next call.
ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)

IDENTITY = {"Accept-Encoding": "identity"}

_UNTIL: ContextVar[float | None] = ContextVar("refitd_client_until", default=None)


class AnswerRefusedError(httpx.RequestError):
    """The answer is more than it may be, or compressed. The message is a sentence's end."""


class _Body:
    """The pieces of a body.

    Args:
        response: the response, of which nothing has been read.
        most: bytes that its body may have.

    Raises:
        AnswerRefusedError: it is compressed, which was not asked for: a few bytes could become any number.
    """

    def __init__(self, response: httpx.Response, most: int) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AnswerRefusedError("its answer is compressed, which was not asked for")
        self._most = most
        self.pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Take in what has come.

        Raises:
            AnswerRefusedError: that is too much.
        """
        self.pieces.append(piece)
        self._size += len(piece)
        if self._size > self._most or len(self.pieces) > MOST_PIECES + self._size // _PACKET:
            raise AnswerRefusedError(f"its answer has more than {self._most} bytes, or is in too many pieces")


def body_of(response: httpx.Response, most: int) -> bytes:
    """Read the body of a response, which was asked for with the headers `IDENTITY`.

    Args:
        response: the response, of which nothing has been read.
        most: bytes that its body may have.

    Raises:
        AnswerRefusedError: it has more, is in too many pieces, or compressed.
    """
    body = _Body(response, most)
    for piece in response.iter_bytes():
        body.add(piece)
    return b"".join(body.pieces)


async def async_body_of(response: httpx.Response, most: int) -> bytes:
    """The same for a call that is awaited."""
    body = _Body(response, most)
    async for piece in response.aiter_bytes():
        body.add(piece)
    return b"".join(body.pieces)


@contextmanager
def ending_within(seconds: float) -> Generator[None]:
    """Give the call that blocks in here so many seconds for all of its exchange, with `BoundedTransport`.

    Raises:
        TimeoutError: they were over before it was.
    """
    until = time.monotonic() + seconds
    token = _UNTIL.set(until)
    try:
        yield
    except httpx.TimeoutException as error:
        if time.monotonic() < until:
            raise
        raise TimeoutError from error
    finally:
        _UNTIL.reset(token)


def _left(timeout: float | None) -> float | None:
    """The seconds that a step may take, of those that are left for the exchange."""
    until = _UNTIL.get()
    if until is None:
        return timeout
    left = until - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout
    return left if timeout is None else min(timeout, left)


class BoundedTransport(httpx.HTTPTransport):
    """httpx's, whose exchanges end when `ending_within` says. `context` has the certificates."""

    def __init__(self, context: SSLContext) -> None:
        super().__init__(verify=context, trust_env=False, limits=ONE_CALL_EACH)
        self._pool = httpcore.ConnectionPool(
            ssl_context=context, max_keepalive_connections=0, network_backend=_Network()
        )


class _Network(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(host, port, _left(timeout), local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _left(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _left(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
