"""Parts of files from another refitd, when its answers are not what they should be."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from refitd_client.http.connection import Connection
from refitd_hosts.follow import byte_source
from refitd_hosts.follow.byte_source import HttpByteSource
from refitd_hosts.follow.upstream import FilePart, GoneError, UnreachableError, UpstreamError, WrongError

PART = FilePart(version="run~v000001", file="model.safetensors", start=10, length=5)
HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 10-14/20\r\nContent-Length: 5\r\n\r\n"


@asynccontextmanager
async def answering(*answers: Callable[[socket.socket], None]) -> AsyncGenerator[HttpByteSource]:
    """A server that answers each connection with the next of these, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    answer(connection)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        source = HttpByteSource(Connection(url=f"http://127.0.0.1:{listener.getsockname()[1]}"), threads=threads)
        try:
            yield source
        finally:
            await source.aclose()


async def filled(source: HttpByteSource) -> bytes:
    buffer = bytearray(5)
    await source.fill(PART, memoryview(buffer))
    return bytes(buffer)


async def test_a_part_is_received_into_the_callers_memory() -> None:
    async with answering(lambda to: to.sendall(HEAD + b"world")) as source:
        assert await filled(source) == b"world"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + b"wor", UnreachableError),
        (b"", UnreachableError),
        (b"\x00garbage\r\n\r\n", UnreachableError),
        (HEAD.replace(b"10-14", b"11-15") + b"world", WrongError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", WrongError),
        (b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n", GoneError),
        (b"HTTP/1.1 503 Not Ready\r\nContent-Length: 0\r\n\r\n", UnreachableError),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", WrongError),
    ],
)
async def test_an_answer_that_is_not_the_part_is_an_error_of_its_kind(
    answer: bytes, error: type[UpstreamError]
) -> None:
    async with answering(lambda to: to.sendall(answer)) as source:
        with pytest.raises(error, match="http://127"):
            await filled(source)


async def test_a_source_that_stalls_in_the_middle_of_a_part_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_source, "STALL_SECONDS", 0.2)
    over = threading.Event()

    def stalls(to: socket.socket) -> None:
        to.sendall(HEAD + b"wor")
        over.wait(10)

    async with answering(stalls) as source:
        with pytest.raises(UnreachableError, match="stalled"):
            await filled(source)
        over.set()


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"HTTP/1.1 206 OK\r\nX-Slow: ", b"a"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["a header a byte at a time", "100 Continue"],
)
async def test_an_exchange_has_one_deadline_however_often_a_byte_comes(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, more: bytes
) -> None:
    for name, seconds in (("CONNECT_SECONDS", 0.1), ("STALL_SECONDS", 0.2), ("_SLOW_LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(byte_source, name, seconds)
    over = threading.Event()

    def drips(to: socket.socket) -> None:
        to.sendall(begin)
        with suppress(OSError):
            while not over.wait(0.02):
                to.sendall(more)

    async with answering(drips) as source:
        async with asyncio.timeout(30):
            with pytest.raises(UnreachableError, match="in whole"):
                await filled(source)
        over.set()


async def test_an_answer_that_goes_on_behind_its_part_is_read_no_further() -> None:
    head = b"HTTP/1.1 206 P\r\nContent-Range: bytes 10-14/20\r\nConnection: close\r\n\r\n"

    def goes_on(to: socket.socket) -> None:
        with suppress(OSError):
            while True:
                to.sendall(bytes(2**16))

    async with answering(lambda to: (to.sendall(head + b"world"), goes_on(to))[-1]) as source:
        with pytest.raises(WrongError, match="goes on"):
            await filled(source)


async def test_a_part_of_two_lengths_is_refused() -> None:
    answer = HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n5\r\nworld\r\n0\r\n\r\n"
    async with answering(lambda to: to.sendall(answer)) as source:
        with pytest.raises(WrongError, match="two lengths"):
            await filled(source)


async def test_a_part_that_is_given_up_ends_at_once_and_writes_nothing_more() -> None:
    began, over = threading.Event(), threading.Event()

    def stalls(to: socket.socket) -> None:
        to.sendall(HEAD + b"wor")
        began.set()
        over.wait(10)

    async with answering(stalls) as source:
        asking = asyncio.create_task(filled(source))
        await asyncio.to_thread(began.wait, 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        over.set()
