"""Engines that are discovered: what places say, and what is made of it when they fall silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from refitd_hosts.discovery import MOST, Dns, EnginesFound, PlaceRefusedError, Router, Silent, parse_place
from refitd_hosts.discovery.scout import GONE_SECONDS, Discovered, ask_dns, ask_router, remember
from support.name_server import Table, naming
from support.scripted_server import answer, serve

A, B = "http://a:1", "http://b:1"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("dns:rollout.svc?port=30000", Dns("rollout.svc", 30000)),
        ("dns:_sglang._tcp.svc?type=SRV", Dns("_sglang._tcp.svc", None)),
        ("dns://10.0.0.53/rollout.svc?port=1", Dns("rollout.svc", 1, ("10.0.0.53", 53))),
        ("dns://[::1]:5353/x?type=srv", Dns("x", None, ("::1", 5353))),
        ("sglang-router+http://router:3000/", Router("http://router:3000")),
        ("sglang-router+http://router:1?key_file=/etc/key", Router("http://router:1", Path("/etc/key"))),
    ],
)
def test_a_place_is_read(text: str, place: object) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text",
    [
        *("dns:x", "dns:?port=1", "dns:x?port=0", "dns:x?port=1&type=SRV", "dns:x?port=many", "dns:x?key=1", ""),
        *(
            "sglang-router+http://u:p@router",
            "sglang-router+router:1",
            "areal:/nfs/me/exp/trial",
            "consul:x",
            "http://router",
        ),
        *("sglang-router+http://router?key=secret", "sglang-router+http://router?key_file=relative"),
    ],
)
def test_what_is_no_place_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(PlaceRefusedError, match="sglang-router"):
        parse_place(text)


def said(*urls: str) -> EnginesFound:
    return EnginesFound("place", frozenset(urls))


def test_engines_come_at_once_and_go_after_a_while() -> None:
    memory = remember(Discovered(), [said(A, B)], 0.0)
    memory = remember(memory, [said(A)], 1.0)
    assert set(memory.missing_since) == {A, B}
    memory = remember(memory, [said(A)], 1.0 + GONE_SECONDS)
    assert set(memory.missing_since) == {A}
    assert memory.fault is None


@pytest.mark.parametrize("answer", [said(), Silent("place", "no answer")])
def test_a_source_that_vanishes_takes_nobody_with_it_and_that_is_said(answer: EnginesFound | Silent) -> None:
    memory = remember(Discovered(), [said(A, B)], 0.0)
    for now in (1.0, 1e6):
        memory = remember(memory, [answer], now)
        assert set(memory.missing_since) == {A, B}
        assert "2 engines that were found before stay" in (memory.fault or "")
    assert remember(memory, [said(B)], 1e6).fault is None


def test_one_engine_that_stays_is_spoken_of_as_one() -> None:
    memory = remember(remember(Discovered(), [said(A)], 0.0), [said()], 1.0)
    assert (memory.fault or "").endswith("; 1 engine that was found before stays")


def test_one_place_of_two_that_is_silent_keeps_those_that_may_be_its_own() -> None:
    memory = remember(Discovered(), [said(A), said(B)], 0.0)
    for now in (1.0, 1e6):
        memory = remember(memory, [said(A), Silent("other", "refused")], now)
    assert set(memory.missing_since) == {A, B}
    assert "other: refused" in (memory.fault or "")


def test_an_engine_that_flickers_stays() -> None:
    memory = remember(Discovered(), [said(A, B)], 0.0)
    for now in range(1, 1000, 50):
        memory = remember(memory, [said(A) if now % 100 == 1 else said(A, B)], float(now))
        assert set(memory.missing_since) == {A, B}


def test_a_place_that_names_too_many_is_not_believed() -> None:
    memory = remember(Discovered(), [said(*(f"http://a:{port}" for port in range(1, MOST + 2)))], 0.0)
    assert memory.missing_since == {}
    assert str(MOST) in (memory.fault or "")


def test_nothing_found_yet_is_no_fault() -> None:
    assert remember(Discovered(), [said()], 0.0) == Discovered()


@asynccontextmanager
async def routing(status: int, body: str) -> AsyncIterator[Router]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /workers ")
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Router(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_router_s_workers_are_engines_healthy_or_not() -> None:
    workers = [{"id": "1", "url": A, "is_healthy": False}, {"url": "http://b:1@0"}, {"url": "http://b:1@1"}]
    async with routing(200, json.dumps({"workers": workers, "total": 3})) as router:
        assert await ask_router(router) == EnginesFound(router.url, frozenset({A, B}))


async def test_a_router_that_has_a_key_is_asked_with_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-router\n")
    with serve(answer(200, {"workers": [{"url": A}]})) as router:
        place = parse_place(f"sglang-router+{router.url}?key_file={tmp_path / 'key'}")
        assert isinstance(place, Router)
        assert await ask_router(place) == EnginesFound(router.url, frozenset({A}))
    assert router.seen[0].headers["authorization"] == "Bearer of-the-router"


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, "{}"), (200, "<html>"), (200, '{"workers": 7}'), (200, '{"workers": [{"url": "grpc://a:1"}]}')],
)
async def test_what_is_no_router_s_answer_is_silence(status: int, body: str) -> None:
    async with routing(status, body) as router:
        assert isinstance(await ask_router(router), Silent)


async def test_addresses_get_the_port_and_services_have_their_own() -> None:
    table: Table = {
        ("e.test.", "A"): ["10.0.0.1", "10.0.0.2"],
        ("e.test.", "AAAA"): ["fd00::1"],
        ("_s._tcp.test.", "SRV"): ["0 0 30000 one.test.", "0 0 30001 two.test."],
    }
    with naming(table) as at:
        found = await ask_dns(Dns("e.test.", 7, at))
        assert found == EnginesFound(
            "dns:e.test.", frozenset({"http://10.0.0.1:7", "http://10.0.0.2:7", "http://[fd00::1]:7"})
        )
        services = await ask_dns(Dns("_s._tcp.test.", None, at))
        assert services == EnginesFound(
            "dns:_s._tcp.test.", frozenset({"http://one.test:30000", "http://two.test:30001"})
        )
        assert await ask_dns(Dns("nothing.test.", 7, at)) == EnginesFound("dns:nothing.test.", frozenset())


async def test_a_service_that_is_not_offered_is_no_engine() -> None:
    with naming({("_s._tcp.test.", "SRV"): ["0 0 0 ."]}) as at:
        assert await ask_dns(Dns("_s._tcp.test.", None, at)) == EnginesFound("dns:_s._tcp.test.", frozenset())


async def test_a_name_that_is_no_host_s_is_silence_and_not_the_service_s_end() -> None:
    with naming({("_s._tcp.test.", "SRV"): [r"0 0 1 a\@b.test."]}) as at:
        found = await ask_dns(Dns("_s._tcp.test.", None, at))
        assert isinstance(found, Silent)
        assert "engine URL" in found.reason


async def test_a_name_server_that_refuses_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_hosts.discovery.scout.SECONDS", 0.2)
    assert isinstance(await ask_dns(Dns("e.test.", 7, ("127.0.0.1", 9))), Silent)
