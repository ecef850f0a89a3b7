"""The front of an engine: what it does with keys, and what it refuses."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import SecretStr

from refitd_front.front import MEMORY, PASSED
from support.attackers import attacking, listening
from support.front_app import front_of
from support.scripted_server import Server, answer, serve


@pytest.fixture
def engine() -> Iterator[Server]:
    with serve(answer(401), answer(200, {"text": "ok"})) as server:
        yield server


@asynccontextmanager
async def facing(
    engine: str, tmp_path: Path, key: Path | None = None, admin_key: Path | None = None, **tokens: Any
) -> AsyncIterator[httpx.AsyncClient]:
    front, versions, _ = front_of(engine, tmp_path, key=key, admin_key=admin_key, **tokens)
    transport = httpx.ASGITransport(cast("Any", front.app()))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as areal:
            yield areal
    finally:
        await front.aclose()
        versions.close()


async def test_a_key_that_was_exchanged_opens_the_engine_without_a_restart(engine: Server, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old")
    async with facing(engine.url, tmp_path, key) as areal:
        assert (await areal.get("/model_info")).status_code == 401
        key.write_text("new")
        engine.steps.insert(0, answer(401))
        generated = await areal.post("/generate", json={"input_ids": [1]})
    assert (generated.status_code, generated.json()) == (200, {"text": "ok"})
    assert [seen.headers["authorization"] for seen in engine.seen] == ["Bearer old", "Bearer old", "Bearer new"]
    assert engine.seen[1].body == engine.seen[2].body


@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/load_lora_adapter"])
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (body, 400, "no JSON object with")
        for body in (b"", b"[]", b"[" * 5000, b'{"x":' * 5000, b'{"model_path":1,"lora_path":1}')
    ],
)
async def test_a_body_of_another_form_or_of_many_levels_is_refused_in_a_sentence(
    tmp_path: Path, route: str, body: bytes, status: int, said: str
) -> None:
    async with facing("http://127.0.0.1:9", tmp_path) as areal:
        reply = await areal.post(route, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, said in reply.text) == (status, True)


async def test_a_clients_request_never_carries_the_admin_key(engine: Server, tmp_path: Path) -> None:
    """With no API key for generation it carries what the client sent, as if the client had asked the engine itself."""
    (tmp_path / "admin").write_text("opens-changes")
    own = {"Authorization": "Bearer of-the-client"}
    async with facing(engine.url, tmp_path, admin_key=tmp_path / "admin") as areal:
        for path, method in PASSED.items():
            await areal.request(method, path)
            await areal.request(method, path, headers=own)
    carried = [seen.headers.get("authorization") for seen in engine.seen]
    assert carried == [None, "Bearer of-the-client"] * len(PASSED)
    assert [seen.path for seen in engine.seen[::2]] == list(PASSED)


async def test_what_ends_requests_carries_the_admin_key_which_engines_want_for_it(
    engine: Server, tmp_path: Path
) -> None:
    """slime and verl end what runs before they update, and have no key of the engines."""
    for name in ("key", "admin"):
        (tmp_path / name).write_text(f"the-{name}")
    engine.steps[:] = [answer(200)]
    async with facing(engine.url, tmp_path, tmp_path / "key", tmp_path / "admin") as trainer:
        assert (await trainer.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert (await trainer.post("/generate", json={})).status_code == 200
    assert [seen.headers["authorization"] for seen in engine.seen] == ["Bearer the-admin", "Bearer the-key"]


@pytest.mark.parametrize(
    "path", ["/./{}", "/x/../{}", "/%2e/{}", "/x/%2e%2e/{}", "//{}", "/%75{}", "/\\{}", "/{}/", "{}"]
)
async def test_a_path_with_two_readings_does_not_reach_an_engine_by_its_admin_key(
    engine: Server, tmp_path: Path, path: str
) -> None:
    """Of a front that has no other key."""
    (tmp_path / "admin").write_text("opens-changes")
    front, *_ = front_of(engine.url, tmp_path, admin_key=tmp_path / "admin")
    for load in ("update_weights_from_disk", "weights_checker"):
        async with listening(front.app()) as server, attacking(server) as attacker:
            line = f"POST {path.format(load)} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            await attacker.send(line.encode() + b'Content-Length: 22\r\n\r\n{"model_path": "/etc"}')
            assert (await attacker.read()).startswith(b"HTTP/1.1 4")
    await front.aclose()
    assert engine.seen == []


async def test_the_fronts_own_token_does_not_go_on_to_the_engine(engine: Server, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("opens-changes")
    token = {"Authorization": "Bearer of-the-front", "Cookie": "a=b"}
    async with facing(engine.url, tmp_path, admin_key=tmp_path / "admin", secret=SecretStr("of-the-front")) as areal:
        await areal.post("/generate", json={}, headers=token)
    (seen,) = engine.seen
    assert not {"authorization", "cookie"} & seen.headers.keys()


async def test_a_half_sent_body_is_cut_off_and_the_engine_hears_nothing_of_it(engine: Server, tmp_path: Path) -> None:
    front, *_ = front_of(engine.url, tmp_path)
    async with listening(front.app(), request=0.3) as server, attacking(server) as attacker:
        await attacker.send(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
        assert (await attacker.refused()).slug == "too-slow"
        await server.until_connections(0)
    await front.aclose()
    assert not engine.seen


async def test_bodies_take_no_more_memory_together_than_they_may(engine: Server, tmp_path: Path) -> None:
    """The first is held back by a pause, with its body."""
    async with facing(engine.url, tmp_path) as areal:
        await areal.post("/pause_generation")
        held = asyncio.create_task(areal.post("/generate", content=b"x" * 1000))
        while MEMORY.used < 1000:  # noqa: ASYNC110 - the limit has no event for it
            await asyncio.sleep(0)
        MEMORY.used += MEMORY.most - 1500
        refused = await areal.post("/generate", content=b"x" * 1000)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        MEMORY.used -= MEMORY.most - 1500
        await areal.post("/continue_generation")
        assert (await held).status_code == 401
        assert MEMORY.used == 0
        assert (await areal.post("/generate", content=_endless())).status_code == 413
    assert MEMORY.used == 0


async def _endless() -> AsyncIterator[bytes]:
    """In chunks, so that no length is declared."""
    while True:
        yield b"x" * 2**20


@pytest.mark.parametrize("sent", [b"Basic \xff", b"Basic", b"Basic !", b"Bearer \xff", b"\xff", b"Basic Og=="])
async def test_what_is_no_credential_is_refused_and_no_bug(sent: bytes, tmp_path: Path) -> None:
    async with facing("http://127.0.0.1:9", tmp_path, secret=SecretStr("of-the-front")) as areal:
        answer = await areal.get("/model_info", headers=[(b"Authorization", sent)])
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/update_weights_from_tensor", "by broadcast"),
        ("/release_memory_occupation", "scheduling_strategy"),
        ("/areal_update_weights_lora_xccl", "by broadcast"),
        ("/sleep", "scheduling_strategy"),
    ],
)
async def test_what_would_change_the_engine_is_refused_with_the_setting_that_calls_it(
    path: str, named: str, tmp_path: Path
) -> None:
    async with facing("http://127.0.0.1:9", tmp_path) as areal:
        refused = await areal.post(path, json={})
    assert refused.status_code == 409
    assert named in refused.json()["message"]


@pytest.mark.parametrize(
    ("pause", "abort"), [("/pause_generation", "/abort_request"), ("/areal_pause_generation", "/abort_requests")]
)
async def test_a_pause_ends_what_runs_by_the_call_that_areals_kind_of_engine_has(
    pause: str, abort: str, tmp_path: Path
) -> None:
    """And where the engine lacks it, AReaL hears why, and nothing stays paused."""
    ended = threading.Event()

    def generate(handler: BaseHTTPRequestHandler) -> None:
        ended.wait(60.0)
        answer(200, {})(handler)

    with serve(generate, answer(404)) as engine:
        async with facing(engine.url, tmp_path) as areal:
            running = asyncio.create_task(areal.post("/v1/completions", json={"prompt": [1]}))
            while not engine.seen:  # noqa: ASYNC110 - the server's thread has no event for it
                await asyncio.sleep(0)
            refused = await areal.post(pause, json={})
            ended.set()
            await running
            assert (await areal.post("/v1/completions", json={"prompt": [1]})).status_code == 404
        assert abort in {seen.path for seen in engine.seen}
    assert refused.status_code == 503
    assert "has no route that ends its requests" in refused.json()["message"]
