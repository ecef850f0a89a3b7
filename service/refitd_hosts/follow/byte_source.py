"""Reads parts of versions' files from another refitd over HTTP/1.1.

Each part is one request with a `Range`, on a connection that is kept for the next. A thread receives it right into the
caller's memory, which may be a mapped file: bytes are copied once, by the kernel.
"""

import asyncio
import http.client
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote, urlsplit

from refitd_client.http.connection import Connection, in_use, why_refused
from refitd_hosts.follow.upstream import FilePart, GoneError, UnreachableError, UpstreamError, WrongError

CONNECT_SECONDS = 5.0
STALL_SECONDS = 10.0  # without a byte
SLOWEST = 2**20  # bytes a second below which a part is given up
_SLICE = 2**20  # bytes between two looks at the clock
_SLOW_LOOK_SECONDS = 1.0  # between two looks at whether an exchange has taken too long
_TOO_LATE = frozenset({404, 410})
_NOT_NOW = frozenset({408, 429, 500, 502, 503, 504, 507})
_MOST_TEXT = 500  # characters of a refusal

ResultT = TypeVar("ResultT")
Take = Callable[[http.client.HTTPResponse, float], ResultT]
"""Takes the body of an answer; the second argument is when it must be there, in monotonic seconds."""


class HttpByteSource:
    """One other refitd. `connection` has its URL, and the token that it wants."""

    def __init__(self, connection: Connection, *, threads: ThreadPoolExecutor) -> None:
        """Open no connection yet.

        Args:
            connection: the URL, and the token.
            threads: receive; the caller owns them.
        """
        self._connection = connection
        self._threads = threads
        at = urlsplit(connection.url)
        self._tls = in_use() if at.scheme == "https" else None
        self._host, self._port, self._prefix = at.hostname or "", at.port, at.path.rstrip("/")
        self._idle: list[http.client.HTTPConnection] = []

    @property
    def name(self) -> str:
        """Its URL."""
        return self._connection.url

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        """See `ByteSource`."""
        path = f"/v1/versions/{quote(part.version, safe='')}/files/{quote(part.file, safe='')}"
        end = part.start + part.length - 1
        headers = {"Range": f"bytes={part.start}-{end}"}

        def take(response: http.client.HTTPResponse, until: float) -> None:
            told = response.headers.get("Content-Range", "").partition("/")[0]
            if response.status != http.client.PARTIAL_CONTENT or told != f"bytes {part.start}-{end}":
                raise WrongError(f"{self.name} did not answer with the part of {part.file} that it was asked for")
            _receive(response, buffer, until)

        await self._asked(path, headers, take, patience=STALL_SECONDS + part.length / SLOWEST)

    async def get(self, path: str, most: int) -> bytes:
        """The body of an answer, which has at most so many bytes.

        Raises:
            UpstreamError: as `ByteSource.fill`.
        """

        def take(response: http.client.HTTPResponse, _: float) -> bytes:
            body = response.read(most + 1)
            if len(body) > most:
                raise WrongError(f"{self.name}{path} answered with more than {most} bytes")
            return body

        return await self._asked(path, {}, take, patience=STALL_SECONDS + most / SLOWEST)

    async def _asked(
        self,
        path: str,
        headers: dict[str, str],
        take: Take[ResultT],
        *,
        patience: float,
    ) -> ResultT:
        """Ask in a thread. The connection is shut, and the thread's end waited for, when the caller is cancelled or the
        whole exchange has taken too long: sockets know how long nothing came, and not how long a byte at a time did.
        """
        call = _Call(self, path, headers, patience)
        asking = asyncio.get_running_loop().run_in_executor(self._threads, call.run, take)
        try:
            while not (await asyncio.wait([asking], timeout=_SLOW_LOOK_SECONDS))[0]:
                if call.is_late:
                    raise UnreachableError(f"{self.name} has not answered in whole after {call.within:g} s")
            return asking.result()
        finally:
            if not asking.done():
                call.shut()
                await asyncio.wait([asking])
                with suppress(UpstreamError):
                    asking.result()

    def connected(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before. Called in threads."""
        with suppress(IndexError):
            return self._idle.pop(), True
        if self._tls is not None:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=self._tls.context()
            ), False
        return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS), False

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to its end. Called in threads."""
        self._idle.append(connection)

    def headers(self) -> dict[str, str]:
        """With the token, of which the file is read again. Called in threads.

        Raises:
            WrongError: the token cannot be read.
        """
        try:
            return self._connection.headers()
        except (OSError, ValueError) as error:
            raise WrongError(f"{self.name} was not asked: {error}") from error

    def path(self, path: str) -> str:
        """A route's path at this URL."""
        return self._prefix + path

    async def aclose(self) -> None:
        """Close the connections that wait."""
        while self._idle:
            self._idle.pop().close()


class _Call:
    """One request, carried out in a thread."""

    def __init__(self, source: HttpByteSource, path: str, headers: dict[str, str], patience: float) -> None:
        self._source = source
        self._path = path
        self._headers = headers
        self._patience = patience
        self._connection: http.client.HTTPConnection | None = None
        self._is_shut = False
        self.within = CONNECT_SECONDS + STALL_SECONDS + patience
        self._until = math.inf  # a call that waits for a thread has all of its time

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self._until

    def shut(self) -> None:
        """End it from another thread."""
        self._is_shut = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self, take: Take[ResultT]) -> ResultT:
        """Send it and take the answer; once more where a connection that was kept turns out to be closed."""
        name, headers = self._source.name, self._source.headers() | self._headers
        self._until = time.monotonic() + self.within
        while True:
            connection, was_kept = self._source.connected()
            self._connection = connection
            try:
                try:
                    response = self._sent(connection, headers)
                except (ConnectionError, http.client.BadStatusLine):
                    if was_kept and not self._is_shut:
                        connection.close()
                        continue
                    raise
                result = self._answered(response, take)
            except UpstreamError:
                connection.close()
                raise
            except TimeoutError as error:
                connection.close()
                raise UnreachableError(f"{name} stalled: it sent nothing for {STALL_SECONDS:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise UnreachableError(f"{name} cut the connection or cannot be reached: {_said(error)}") from error
            except BaseException:
                connection.close()
                raise
            if response.isclosed() and not response.will_close and not self._is_shut:
                self._source.keep(connection)
            else:
                connection.close()
            return result

    def _sent(self, connection: http.client.HTTPConnection, headers: dict[str, str]) -> http.client.HTTPResponse:
        if getattr(connection, "sock", None) is None:
            connection.connect()
        if self._is_shut:
            raise ConnectionAbortedError("given up")
        connection.sock.settimeout(STALL_SECONDS)
        connection.request("GET", self._source.path(self._path), headers=headers)
        return connection.getresponse()

    def _require_one_length(self, response: http.client.HTTPResponse) -> None:
        if "Content-Length" in response.headers and "Transfer-Encoding" in response.headers:
            raise WrongError(f"{self._source.name} gave an answer of two lengths")

    def _answered(self, response: http.client.HTTPResponse, take: Take[ResultT]) -> ResultT:
        try:
            self._require_one_length(response)
            if response.status < 300:
                return take(response, time.monotonic() + self._patience)
            text = response.read(_MOST_TEXT).decode(errors="replace")
        except BaseException:
            response.close()  # a connection that ends with its answer does not close it
            raise
        told = f"{self._source.name} answered {response.status} to {self._path}: {text}"
        if response.status in _TOO_LATE:
            raise GoneError(told)
        raise UnreachableError(told) if response.status in _NOT_NOW else WrongError(told)


def _receive(response: http.client.HTTPResponse, buffer: memoryview, until: float) -> None:
    """Fill the buffer with the body, which must have as many bytes."""
    at = 0
    while at < len(buffer):
        count = response.readinto(buffer[at : at + _SLICE])
        if count == 0:
            raise ConnectionResetError(f"the answer ended after {at} of {len(buffer)} bytes")
        if time.monotonic() > until:
            raise TimeoutError("the part comes too slowly")
        at += count
    if response.read(1):  # its end, so that the connection can be kept
        raise WrongError("the answer goes on behind the part that was asked for")


def _said(error: Exception) -> str:
    return why_refused(error) or str(error) or type(error).__name__
