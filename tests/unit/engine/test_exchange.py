"""One answer over one connection: what is whole is read, what is not whole or not HTTP is an error, never a guess."""

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.engine import http
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.sglang.info import ModelInfo
from refitd.engine.wire import USUAL_BYTES, Exchange, HttpAnswer, NotHttpError, PlainConnection, Request, TooLargeError
from refitd.memory import BodyMemory
from support.endless_server import CHUNK, CHUNKED, answering
from support.fuzz import FUZZ
from support.scripted_server import answer, serve

LIMIT = 1000
REQUEST = Request("GET", b"/", [("Host", "engine")])
BODY = b'{"a": 1}'
WITH_LENGTH = b"HTTP/1.1 200 OK\r\nDate: today\r\nContent-Length: 8\r\n\r\n" + BODY
IN_CHUNKS = (
    b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n5;note=x\r\n": 1}\r\n0\r\ntrailer: y\r\n\r\n'
)
UNTIL_THE_END = b"HTTP/1.0 200\r\n\r\n" + BODY
AFTER_ANOTHER = b"HTTP/1.1 103 Early Hints\r\n\r\n" + WITH_LENGTH


async def read(parts: Sequence[bytes], *, end: bytes | Exception | None = b"") -> HttpAnswer:
    """What an exchange makes of an answer that arrives in parts, and of the end: None where it has to come before."""
    left = [*parts]

    async def receive() -> bytes:
        if left:
            return left.pop(0)
        if isinstance(end, Exception):
            raise end
        assert end is not None, "it waits for more"
        return end

    return await Exchange(REQUEST, LIMIT).answer(receive)


@FUZZ
@given(cuts=st.lists(st.integers(0, 150), max_size=8), which=st.integers(0, 3))
def test_an_answer_is_the_same_however_it_is_cut_into_packets(cuts: list[int], which: int) -> None:
    answer = (WITH_LENGTH, IN_CHUNKS, UNTIL_THE_END, AFTER_ANOTHER)[which]
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    parts = [answer[begin:end] for begin, end in pairwise(places)]
    found = asyncio.run(read(parts))
    assert (found.status, found.body) == (200, BODY)


async def test_an_answer_whose_length_is_known_does_not_wait_for_the_connection_to_end() -> None:
    for whole in (WITH_LENGTH, IN_CHUNKS, b"HTTP/1.1 204 No Content\r\n\r\n"):
        await read([whole], end=None)


@pytest.mark.parametrize("answer", [WITH_LENGTH, IN_CHUNKS, AFTER_ANOTHER])
async def test_an_answer_that_breaks_off_is_no_answer(answer: bytes) -> None:
    for length in range(len(answer) - 1):
        with pytest.raises(NotHttpError):
            await read([answer[:length]])


async def test_a_connection_that_is_reset_is_no_answer_even_where_its_end_would_have_been_one() -> None:
    with pytest.raises(ConnectionResetError):
        await read([UNTIL_THE_END], end=ConnectionResetError())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 20x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno field\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x8\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nContent-Length: 9\r\n\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    ],
)
async def test_what_is_no_http_is_refused(answer: bytes) -> None:
    with pytest.raises(NotHttpError):
        await read([answer], end=None)


@pytest.mark.parametrize("head", [b"Content-Length: 1001", b"Transfer-Encoding: chunked", b"Connection: close"])
async def test_no_answer_takes_more_memory_than_it_may(head: bytes) -> None:
    body = b"x" * (LIMIT + 1)
    if b"chunked" in head:
        body = b"3E9\r\n" + body
    with pytest.raises(TooLargeError):
        await read([b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body], end=None)


async def test_a_connection_carries_one_request_and_is_closed_in_any_case() -> None:
    """Also where the caller gives up in the middle: a thousand engines would use up the descriptors."""
    heard, closed = asyncio.Event(), asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        heard.set()
        if b"/answered" in asked:
            writer.write(WITH_LENGTH)
        try:
            closed.put_nowait(await reader.read())
        except ConnectionResetError:
            closed.put_nowait(b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = Transport(url, api_key=None, admin_key=None)
        assert isinstance(await transport.get("/answered", 5.0), Reply)
        assert await closed.get() == b""
        heard.clear()
        asking = asyncio.create_task(transport.get("/silent", 60.0))
        await heard.wait()
        asking.cancel()
        await asyncio.wait({asking})
        assert await closed.get() == b""


async def test_a_call_leaves_nothing_to_the_garbage_collector() -> None:
    """An update of a thousand engines is five thousand calls: looking for what is left of them stops everything."""
    with serve(*[answer(200, {})] * 6) as server, _kept_garbage() as garbage:
        transport = Transport(server.url, api_key=None, admin_key=None)
        for _ in range(5):
            assert isinstance(await transport.get("/model_info", 5.0), Reply)
        gc.collect()
        assert [each for each in garbage if isinstance(each, asyncio.Transport | Exchange | PlainConnection)] == []


@contextmanager
def _kept_garbage() -> Generator[list[object]]:
    """What only the garbage collector finds, which is off meanwhile."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("key", ["two\r\nX-More: yes", "two\nlines", "twö\u20ac"])
async def test_a_key_cannot_add_a_header_and_is_not_told(key: str) -> None:
    reply = await Transport("http://127.0.0.1:9", api_key=key, admin_key=None).get("/model_info", 1.0)
    assert isinstance(reply, NoReply)
    assert reply.lost is CallFailure.NEVER_SENT
    assert "tw" not in reply.reason


async def test_a_port_where_nothing_listens_never_got_the_call() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        reply = await Transport(f"http://127.0.0.1:{port}", api_key=None, admin_key=None).post("/load", {}, 5.0)
    assert isinstance(reply, NoReply)
    assert (reply.lost, reply.nothing_listens) == (CallFailure.NEVER_SENT, True)


@pytest.mark.parametrize("lengths", [b"Content-Length: 8\r\nTransfer-Encoding: chunked"])
async def test_an_answer_of_two_lengths_is_none(lengths: bytes) -> None:
    with pytest.raises(NotHttpError, match="both"):
        await read([b"HTTP/1.1 200 OK\r\n" + lengths + b"\r\n\r\n0\r\n\r\n"])


@pytest.mark.parametrize(
    "endless", [b"HTTP/1.1 100 Continue\r\n\r\n", b"1\r\n \r\n"], ids=["100 Continue", "chunks of one byte"]
)
async def test_an_answer_in_pieces_without_end_is_given_up_before_it_takes_the_loop(endless: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if endless[:1] == b"1" else b""

    async def receive() -> bytes:
        return parts.pop() if parts else endless * 1000

    parts = [head + endless]
    with pytest.raises(TooLargeError):
        await Exchange(REQUEST, 2**20).answer(receive)


async def test_all_answers_that_come_in_have_one_memory_and_usual_ones_always_a_place_in_it() -> None:
    memory, length, end = BodyMemory(most=3 * USUAL_BYTES), 2 * USUAL_BYTES, asyncio.Event()

    async def ask(size: int, *, waits: bool = False) -> int:
        parts = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, bytes(size - 1), b"1"]

        async def receive() -> bytes:
            if waits and len(parts) == 1:
                await end.wait()
            return parts.pop(0)

        return len((await Exchange(REQUEST, length, memory).answer(receive)).body)

    async with asyncio.TaskGroup() as group:
        slow = group.create_task(ask(length, waits=True))
        await asyncio.sleep(0)
        with pytest.raises(TooLargeError, match="together"):
            await ask(length)
        assert await ask(USUAL_BYTES) == USUAL_BYTES
        end.set()
    assert (slow.result(), await ask(length), memory.used) == (length, length, 0)


async def test_a_call_is_told_that_all_answers_together_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWERS", BodyMemory(most=2**17))
    with answering(CHUNKED, CHUNK) as url:
        reply = await Transport(url, api_key=None, admin_key=None).get("/model_info", within=30)
    assert isinstance(reply, NoReply)
    assert "all answers together" in reply.reason


def test_what_a_type_does_not_know_of_an_answer_is_not_made() -> None:
    reply = Reply(200, b'{"model_path":"m","weight_version":"1","x":[' + b"[]," * 2**20 + b"[]]}")
    reply.read_as(ModelInfo)  # the type is known from then on
    tracemalloc.start()
    try:
        assert reply.read_as(ModelInfo).model_path == "m"
        assert (reply.data, reply.message[:14]) == (None, '{"model_path":')
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b"[" * 100_000, b'{"model_path":"\xff"}', b'{"x":' * 100_000])
def test_an_answer_of_another_form_is_an_error_of_one_kind(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        Reply(200, body).read_as(ModelInfo)
    assert Reply(200, body).data is None
