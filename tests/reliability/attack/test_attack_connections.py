"""Attacks with a socket: slow ones, giant ones, and those that never end."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from refitd.api.connection import ConnectionSlots
from refitd.api.limits import MAX_BODY_BYTES, MOST_VALUES, WaitSlots
from refitd.api.server import PATIENCE
from support.attackers import GIVE_UP, attacking, listening, problem_in
from support.checkpoints import publish, tensors
from support.services import Stage, serving

POST = b"POST /v1/versions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
STREAM = b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LOOK = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n", LOOK[:-2] + b"X-Slow: "])
async def test_slow_loris_on_the_head_is_cut_off(tmp_path: Path, begin: bytes) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, request=0.3) as server, attacking(server) as attacker:
        await attacker.send(begin)
        problem = problem_in(await attacker.drip() if begin else await attacker.read())
        assert (problem.status, problem.slug) == (408, "too-slow")
        await server.until_connections(0)


async def test_slow_loris_on_the_body_is_cut_off_and_no_route_hears_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, request=0.3) as server, attacking(server) as attacker:
        await attacker.send(POST + b'Content-Length: 100000\r\n\r\n{"run":"run","step":1,"path":"')
        assert problem_in(await attacker.drip()).slug == "too-slow"
        await server.until_connections(0)
        assert stage.store.versions == {}


@pytest.mark.parametrize("byte", [b"G", b"\r\n"])
async def test_slow_loris_between_requests_is_cut_off(tmp_path: Path, byte: bytes) -> None:
    """Each byte ends the time for an idle connection."""
    async with (
        serving(tmp_path) as stage,
        listening(stage.api, request=0.3, idle=30) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(LOOK)
        assert b'{"status":"ok"}' in await attacker.drip(byte)
        await server.until_connections(0)


async def test_half_a_request_behind_a_whole_one_is_cut_off(tmp_path: Path) -> None:
    """Both came in one piece: nothing more comes that could begin its time."""
    async with (
        serving(tmp_path) as stage,
        listening(stage.api, request=0.3, idle=30) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(LOOK + POST + b"Content-Length: 10\r\n\r\n{")
        said = await attacker.read()
        assert (said.count(b"HTTP/1.1 200"), said.count(b"HTTP/1.1 408")) == (1, 1)


async def test_a_body_that_goes_on_behind_the_answer_is_cut_off(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, token="secret") as stage,
        listening(stage.api, request=0.3) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(POST + b"Content-Length: 1000000\r\n\r\n")
        assert b" 401 " in await attacker.drip()
        await server.until_connections(0)


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, idle=0.1) as server, attacking(server) as attacker:
        await attacker.send(LOOK + LOOK)
        assert (await attacker.read()).count(b'{"status":"ok"}') == 2


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 10**18])
async def test_a_giant_body_is_refused_by_its_declared_length(tmp_path: Path, length: int) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, request=0.3) as server, attacking(server) as attacker:
        await attacker.send(POST + b"Content-Length: %d\r\n\r\n{" % length)
        assert (await attacker.refused()).slug == "too-large"


async def test_a_giant_body_in_chunks_is_refused_while_it_comes_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, request=0.5) as server, attacking(server) as attacker:
        await attacker.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY_BYTES // 2**16 + 1):
            await attacker.send(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
        assert (await attacker.refused()).slug == "too-large"
        assert stage.store.versions == {}


async def test_a_body_of_many_values_is_refused_before_anything_is_made_of_it(tmp_path: Path) -> None:
    body = b"[" + b"[]," * MOST_VALUES + b"[]]"
    async with serving(tmp_path) as stage, listening(stage.api, idle=0.1) as server, attacking(server) as attacker:
        await attacker.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await attacker.refused()).slug == "too-large"


async def test_a_content_length_that_lies_does_not_smuggle_a_second_request_past_the_token(tmp_path: Path) -> None:
    inner = b"PUT /v1/versions/run~v000001/pin HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with (
        serving(tmp_path, token="secret") as stage,
        listening(stage.api, idle=0.1) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(LOOK[:-2] + b"Content-Length: 2\r\n\r\n{}" + inner)
        answers = await attacker.read()
        assert (answers.count(b"HTTP/1.1 200"), answers.count(b"HTTP/1.1 401")) == (1, 1)


@pytest.mark.parametrize(
    "lengths", [b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: -1", b"Content-Length: 1e9"]
)
async def test_a_content_length_that_contradicts_itself_is_no_http(tmp_path: Path, lengths: bytes) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server, attacking(server) as attacker:
        await attacker.send(POST + lengths + b"\r\n\r\n{}")
        assert (await attacker.refused()).slug == "bad-request"


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"X-Large: " + b"x" * 200_000, id="one of 200 kB"),
        pytest.param(b"\r\n".join(b"X-%d: y" % number for number in range(101)), id="101"),
        pytest.param(b"\r\n".join(b"a:" for _ in range(50_000)), id="50000 empty ones"),
    ],
)
async def test_headers_that_are_too_large_or_too_many_are_refused(tmp_path: Path, head: bytes) -> None:
    async with (
        serving(tmp_path) as stage,
        listening(stage.api, request=1.0, idle=0.1) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(LOOK[:-2] + head + b"\r\n\r\n")
        assert (await attacker.refused()).slug in {"head-too-large", "bad-request"}
        await server.until_connections(0)


async def test_a_half_closed_stream_holds_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server, attacking(server) as attacker:
        await attacker.send(STREAM)
        await attacker.reader.readuntil(b"\r\n\r\n")
        assert stage.api.state.waiting.count == 1
        attacker.writer.write_eof()
        await attacker.read()
        await server.until_connections(0)
        async with attacking(server) as later:  # its slot is free again
            stage.api.state.waiting.slots = WaitSlots(client=1)
            await later.send(STREAM)
            assert b"200 OK" in await later.reader.readuntil(b"\r\n\r\n")


async def test_more_connections_than_there_may_be_are_turned_away(tmp_path: Path) -> None:
    """All slots are taken by requests that are being answered, and so are those for health."""
    slots = ConnectionSlots(all=2, peer=2, health=1)
    async with serving(tmp_path) as stage, listening(stage.api, slots=slots, idle=0.1) as server:
        async with attacking(server) as one, attacking(server) as two:
            for each in (one, two):
                await each.send(STREAM)
                await each.reader.readuntil(b"\r\n\r\n")
            async with attacking(server) as third:
                await third.send(b"GET /v1/versions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                said = await third.read()
                assert (problem_in(said).status, problem_in(said).slug) == (503, "too-many")
                assert b"retry-after: 1" in said.lower()
            async with attacking(server) as orchestrator:
                await orchestrator.send(LOOK)
                assert b'{"status":"ok"}' in await orchestrator.read()
        await server.until_connections(0)
        async with attacking(server) as later:
            await later.send(LOOK)
            assert b"HTTP/1.1 200" in await later.read()


@pytest.mark.parametrize("begun", [b"", POST + b"Content-Length: 10\r\n\r\n{"])
async def test_half_open_connections_of_one_client_shut_out_nobody(tmp_path: Path, begun: bytes) -> None:
    """More than there are slots. Each that comes makes the one close that has waited longest."""
    async with serving(tmp_path) as stage, listening(stage.api) as server, AsyncExitStack() as open_ends:
        for _ in range(PATIENCE.slots.all + 2):
            attacker = await open_ends.enter_async_context(attacking(server))
            await attacker.send(begun)
        for path in (b"/healthz", b"/readyz", b"/v1/versions"):
            async with attacking(server) as client:
                await client.send(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % path)
                assert b"HTTP/1.1 200" in await client.read()
        assert len(server.connections) <= PATIENCE.slots.all


async def test_one_peer_with_all_of_its_places_leaves_the_others_theirs(tmp_path: Path) -> None:
    slots = ConnectionSlots(all=4, peer=2, health=1)
    async with (
        serving(tmp_path) as stage,
        listening(stage.api, slots=slots) as server,
        attacking(server) as one,
        attacking(server) as two,
    ):
        for each in (one, two):
            await each.send(STREAM)
            await each.reader.readuntil(b"\r\n\r\n")
        async with attacking(server) as third:
            await third.send(STREAM)
            assert b"HTTP/1.1 503" in await third.reader.readuntil(b"\r\n")
        await server.until_connections(2)
        for connection in server.connections:
            connection.peer = "192.0.2.1"
        async with attacking(server) as other:
            await other.send(STREAM)
            assert b"200 OK" in await other.reader.readuntil(b"\r\n\r\n")


async def test_health_is_answered_however_many_connections_wait_for_it_and_send_nothing(tmp_path: Path) -> None:
    """The slots for health are full of half-open connections too."""
    slots = ConnectionSlots(all=1, peer=1, health=2)
    async with serving(tmp_path) as stage, listening(stage.api, slots=slots) as server, AsyncExitStack() as open_ends:
        first = await open_ends.enter_async_context(attacking(server))
        await first.send(STREAM)
        await first.reader.readuntil(b"\r\n\r\n")
        for _ in range(5):
            await open_ends.enter_async_context(attacking(server))
        async with attacking(server) as orchestrator:
            await orchestrator.send(LOOK)
            assert b'{"status":"ok"}' in await orchestrator.read()


async def test_more_event_streams_than_there_may_be_are_turned_away(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api, idle=0.1) as server, attacking(server) as second:
        stage.api.state.waiting.slots = WaitSlots(client=2)
        async with attacking(server) as first:
            for each in (first, second):
                await each.send(STREAM)
                assert b"200 OK" in await each.reader.readuntil(b"\r\n\r\n")
            async with attacking(server) as third:
                await third.send(STREAM)
                said = await third.read()
                assert problem_in(said).slug == "too-many"
                assert b"retry-after" in said.lower()
        await server.until_connections(1)
        async with attacking(server) as later:
            await later.send(STREAM)
            assert b"200 OK" in await later.reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize("path", [b"/v1/versions/run~v000001/wait?for=served&timeout=60", b"/v1/events"])
async def test_two_hundred_requests_of_one_client_that_wait_leave_a_trainer_its_way(
    tmp_path: Path, path: bytes
) -> None:
    """They have the trainer's address, and no token."""
    async with serving(tmp_path, names=(), token="secret") as stage, listening(stage.api) as server:
        publish(stage.root, "run", 1, tensors(1))
        headers = {"Authorization": "Bearer secret"}
        url = f"http://127.0.0.1:{server.port}/v1/versions"
        async with AsyncExitStack() as open_ends, httpx.AsyncClient(trust_env=False, headers=headers) as trainer:
            notice = {"run": "run", "step": 1}
            assert (await trainer.post(url, json=notice)).is_success  # the service may have seen it already
            for _ in range(200):
                attacker = await open_ends.enter_async_context(attacking(server))
                await attacker.send(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path)
            async with asyncio.timeout(GIVE_UP):
                while stage.api.state.waiting.count < WaitSlots().client:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
            assert (await trainer.post(url, json=notice)).status_code == 200
            async with trainer.stream("GET", f"http://127.0.0.1:{server.port}/v1/events") as stream:
                assert stream.status_code == 200
        async with asyncio.timeout(GIVE_UP):  # the places of clients that went away are free again
            while stage.api.state.waiting.count:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)


async def test_what_is_known_is_answered_to_a_client_that_may_not_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        stage.api.state.waiting.slots = WaitSlots(client=0)
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        refused = await stage.http.get("/v1/versions/run~v000001/wait?for=served&timeout=60")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        stage.api.state.waiting.slots = WaitSlots()
        await stage.http.get("/v1/versions/run~v000001/wait?for=sealed&timeout=60")
        stage.api.state.waiting.slots = WaitSlots(client=0)
        assert (await stage.http.get("/v1/versions/run~v000001/wait?for=sealed")).json()["outcome"] == "sealed"


@pytest.mark.parametrize(
    "lengths", [b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"transfer-encoding: chunked\r\ncontent-length: 0"]
)
async def test_a_request_of_two_lengths_ends_its_connection(tmp_path: Path, lengths: bytes) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server, attacking(server) as attacker:
        await attacker.send(LOOK[:-2] + lengths + b"\r\n\r\n0\r\n\r\n" + LOOK)
        said = await attacker.read()
        assert said.count(b"HTTP/1.1 ") == 1
        assert (problem_in(said).status, problem_in(said).slug) == (422, "bad-request")


def much_to_say(stage: Stage) -> None:
    """20 MB of events, more than the kernel takes for a client that does not."""
    with capture_logs():
        for _ in range(400):
            stage.store.say("test", "run", "x" * 50_000)


async def test_a_client_that_never_reads_its_stream_fills_no_memory_and_is_cut_off(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as stage,
        listening(stage.api, reading=1.0) as server,
        attacking(server, window=4096) as attacker,
    ):
        await attacker.send(STREAM)
        await attacker.reader.readuntil(b"\r\n\r\n")
        (connection,) = server.connections
        attacker.reader._transport.pause_reading()  # type: ignore[attr-defined]
        much_to_say(stage)
        most = 0
        async with asyncio.timeout(GIVE_UP):
            while server.connections:
                most = max(most, connection.transport.get_write_buffer_size())
                await asyncio.sleep(0.005)
        assert 0 < most < 2**20
        assert connection.transport.is_closing()


async def test_streams_that_are_open_or_never_read_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as stage,
        listening(stage.api) as server,
        attacking(server) as reader,
        attacking(server, window=4096) as deaf,
    ):
        for each in (reader, deaf):
            await each.send(STREAM)
            await each.reader.readuntil(b"\r\n\r\n")
        deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
        much_to_say(stage)
        server.config.timeout_graceful_shutdown = 3600  # beyond all patience: nobody is waited for
        server.should_exit = True
        await reader.read()
