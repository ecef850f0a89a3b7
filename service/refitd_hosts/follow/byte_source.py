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
NOT_NOW = frozenset({408, 429, 500, 502, 503, 504, 507})
_MOST_TEXT = 500  # characters of a refusal

ResultT = TypeVar("ResultT")
Take = Callable[[http.client.HTTPResponse, float], ResultT]
"""Takes the body of an answer; the second argument is when it must be there, in monotonic seconds."""


class HttpByteSource:
    """One other refitd. `connection` has its URL, and the token that it wants; `threads` receive."""

    def __init__(self, connection: Connection, *, threads: ThreadPoolExecutor) -> None:
        self.name = connection.url
        self._connection, self._threads = connection, threads
        self._at = urlsplit(connection.url)
        self._tls = in_use() if self._at.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        path = f"/v1/versions/{quote(part.version, safe='')}/files/{quote(part.file, safe='')}"
        wanted = f"{part.start}-{part.start + part.length - 1}"

        def take(response: http.client.HTTPResponse, until: float) -> None:
            told = response.headers.get("Content-Range", "").partition("/")[0]
            if response.status != http.client.PARTIAL_CONTENT or told != f"bytes {wanted}":
                raise WrongError(f"{self.name} did not answer with the part of {part.file} that it was asked for")
            _receive(response, buffer, until)

        await self._ask(path, {"Range": f"bytes={wanted}"}, take, STALL_SECONDS + part.length / SLOWEST)

    async def get(self, path: str, most: int) -> bytes:
        """The body of an answer, which has at most so many bytes."""

        def take(response: http.client.HTTPResponse, _: float) -> bytes:
            body = response.read(most + 1)
            if len(body) > most:
                raise WrongError(f"{self.name}{path} answered with more than {most} bytes")
            return body

        return await self._ask(path, {}, take, STALL_SECONDS + most / SLOWEST)

    async def _ask(self, path: str, headers: dict[str, str], take: Take[ResultT], patience: float) -> ResultT:
        """Ask in a thread. The connection is shut, and the thread's end waited for, when the caller is cancelled or the
        whole exchange has taken too long: sockets know how long nothing came, and not how long a byte at a time did.
        """
        call = _Call(self, path, headers, patience)
        asking = asyncio.get_running_loop().run_in_executor(self._threads, call.run, take)
        try:
            while not (await asyncio.wait([asking], timeout=_SLOW_LOOK_SECONDS))[0]:
                if time.monotonic() > call.until:
                    raise UnreachableError(f"{self.name} has not answered in whole after {call.within:g} s")
            return asking.result()
        finally:
            if not asking.done():
                call.shut()
                await asyncio.wait([asking])
                with suppress(UpstreamError):
                    asking.result()

    # The rest but `aclose` is called in threads.

    def connect(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with suppress(IndexError):
            return self._idle.pop(), True
        host, port = self._at.hostname or "", self._at.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS), False
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls.context()), False

    def keep(self, connection: http.client.HTTPConnection) -> None:
        self._idle.append(connection)

    def headers(self) -> dict[str, str]:
        """With the token, of which the file is read again."""
        try:
            return self._connection.headers()
        except (OSError, ValueError) as error:
            raise WrongError(f"{self.name} was not asked: {error}") from error

    def path(self, path: str) -> str:
        return self._at.path.rstrip("/") + path

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Call:
    """One request, carried out in a thread. `until` is the end of its time, which begins when it has a thread."""

    def __init__(self, source: HttpByteSource, path: str, headers: dict[str, str], patience: float) -> None:
        self._source, self._path, self._headers, self._patience = source, path, headers, patience
        self._connection: http.client.HTTPConnection | None = None
        self._is_shut = False
        self.within, self.until = CONNECT_SECONDS + STALL_SECONDS + patience, math.inf

    def shut(self) -> None:
        self._is_shut = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self, take: Take[ResultT]) -> ResultT:
        """Send it and take the answer; once more where a connection that was kept turns out to be closed."""
        name, headers = self._source.name, self._source.headers() | self._headers
        self.until = time.monotonic() + self.within
        while True:
            self._connection, was_kept = self._source.connect()
            is_whole = False
            try:
                try:
                    response = self._send(self._connection, headers)
                except (ConnectionError, http.client.BadStatusLine):
                    if was_kept and not self._is_shut:
                        continue
                    raise
                result = self._read_answer(response, take)
                is_whole = response.isclosed() and not response.will_close and not self._is_shut
            except TimeoutError as error:
                raise UnreachableError(f"{name} stalled: it sent nothing for {STALL_SECONDS:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                why = why_refused(error) or str(error) or type(error).__name__
                raise UnreachableError(f"{name} cut the connection or cannot be reached: {why}") from error
            finally:
                self._source.keep(self._connection) if is_whole else self._connection.close()
            return result

    def _send(self, connection: http.client.HTTPConnection, headers: dict[str, str]) -> http.client.HTTPResponse:
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

    def _read_answer(self, response: http.client.HTTPResponse, take: Take[ResultT]) -> ResultT:
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
        raise UnreachableError(told) if response.status in NOT_NOW else WrongError(told)


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
