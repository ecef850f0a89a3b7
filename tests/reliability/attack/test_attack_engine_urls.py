"""Attacks with an engine's URL: into the network, to a cloud's metadata, by a name that changes its address, by a
redirect, by a proxy, and through the keys that engines get.
"""

import asyncio
import errno
import threading
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest

from refitd.engine.address import Address, AllowList, AllowRefusedError, parse_allow_list, refusal
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.port import Reached, Unreached
from refitd.engine.registry import EngineSpec, connector
from refitd.engine.wire import Guard, NotConnectedError, dial, refused
from refitd.policy.roster import OperatorHosts, guard_of, named_by_operator
from refitd.settings import Settings
from refitd.state.records import EngineRecord, Naming, Source
from refitd_client import RefitClient
from refitd_client.errors import ServiceUnreachableError
from support.scripted_server import answer, serve
from support.services import serving

METADATA = ["http://169.254.169.254", "http://[fe80::1]", "http://[fd00:ec2::254]", "http://100.100.100.200"]
NOWHERE = ["http://0.0.0.0:1", "http://0:1", "http://[::]:1", "http://224.0.0.1", "http://[ff02::1]"]
DISGUISED = ["http://2852039166", "http://0xa9fea9fe", "http://[::ffff:169.254.169.254]", "http://[64:ff9b::a9fe:a9fe]"]
CLOUDS = ["http://168.63.129.16", "http://[fd20:ce::254]", "http://192.0.0.192"]
LOOPBACK_ELSEWHERE = [
    "http://[2002:7f00:1::1]",
    "http://[64:ff9b::7f00:1]",
    "http://[64:ff9b:1::7f00:1]",
    "http://[::127.0.0.1]",
]
ALL = ["*", "0.0.0.0/0", "::/0"]


@pytest.mark.parametrize("url", [*METADATA, *NOWHERE, *DISGUISED, *CLOUDS, *LOOPBACK_ELSEWHERE])
async def test_metadata_and_addresses_of_nobody_are_refused_whatever_is_allowed(tmp_path: Path, url: str) -> None:
    for allowed in ([], ALL):
        async with serving(tmp_path, names=(), engine_allow=allowed) as stage:
            answer = await stage.http.post("/v1/engines", json={"url": url})
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:refitd:problem:engine-not-allowed")
            assert "no engine is there" in answer.json()["detail"]
            assert stage.store.engines == {}


@pytest.mark.parametrize("url", ["http://10.0.0.5:30000", "http://[fd12::1]:1", "http://8.8.8.8", "http://intranet"])
async def test_an_engine_inside_the_network_is_refused_unless_it_is_allowed(tmp_path: Path, url: str) -> None:
    async with serving(tmp_path, names=(), engine_allow=[]) as stage:
        answer = await stage.http.post("/v1/engines", json={"url": url})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:refitd:problem:engine-not-allowed")
        assert "REFITD_ENGINE_ALLOW" in answer.json()["detail"]
        assert stage.store.engines == {}
    async with serving(tmp_path, names=(), engine_allow=["10.0.0.0/24", "fd12::/16", "8.8.8.8", "intra*"]) as stage:
        assert (await stage.http.post("/v1/engines", json={"url": url})).status_code == 201


def verdict(host: str, address: str | None, *allow: str, named: tuple[str, ...] = ()) -> str | None:
    return refusal(host, None if address is None else ip_address(address), parse_allow_list(allow), named)


@pytest.mark.parametrize(
    ("host", "address", "allow", "good"),
    [
        ("engine-7", "10.0.0.7", ["engine-*"], True),
        ("ENGINE-7.", "10.0.0.7", ["engine-?"], True),
        ("engine-7.evil.com", "6.6.6.6", ["engine-7"], False),
        ("x.pod.local", "10.0.0.7", ["*.pod.local"], True),
        ("10.0.0.7", "10.0.0.7", ["10.0.0.0/29"], True),
        ("10.0.0.8", "10.0.0.8", ["10.0.0.0/29"], False),
        ("name", "10.0.0.7", ["10.0.0.0/29"], True),
        ("localhost", "127.0.0.1", ["10.0.0.0/29"], False),
        ("::ffff:10.0.0.7", "::ffff:10.0.0.7", ["10.0.0.0/29"], True),
        ("name", None, ["name"], True),
        ("name", None, ["10.0.0.0/29"], False),
        ("name", None, [], False),
    ],
)
def test_the_allow_list_is_the_whole_truth(host: str, address: str | None, allow: list[str], good: bool) -> None:
    assert (verdict(host, address, *allow) is None) is good


@pytest.mark.parametrize("entry", ["http://a", "a:1", "10.0.0.0/33", "a/b", "user@a", ""])
def test_an_entry_of_the_allow_list_that_is_none_stops_the_start(tmp_path: Path, entry: str) -> None:
    with pytest.raises(AllowRefusedError):
        parse_allow_list([entry])
    if entry:
        with pytest.raises(ValueError, match="engine_allow"):
            Settings(root=tmp_path, engine_allow=[entry])


async def test_the_engines_file_is_the_operators_word_unless_there_is_an_allow_list(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        stage.store.put_engine(EngineRecord(id="f", url="http://10.0.0.9:1", naming=Naming(source=Source.FILE)))
        stage.store.put_engine(EngineRecord(id="x", url="http://10.0.0.8:1", naming=Naming(source=Source.API)))
        free = guard_of(Settings(root=tmp_path).operator_hosts, stage.store.engines)
        bound = guard_of(OperatorHosts(allow=("10.1.0.0/16",)), stage.store.engines)
        for address in ("10.0.0.9", "10.0.0.8"):
            assert (free(address, ip_address(address)) is None) is (address == "10.0.0.9")
            assert bound(address, ip_address(address)) is not None


async def test_dns_rebinding_leads_to_no_address_that_was_not_checked() -> None:
    """The name had a good address when the engine was added, and has another when it is called."""
    answers = [["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1"]]

    async def resolve(host: str) -> list[Address]:
        return [ip_address(each) for each in answers.pop(0)]

    def guard(host: str, address: Address | None) -> str | None:
        return refusal(host, address, AllowList(), ())

    assert await refused("engine", guard, resolve) is None
    for _ in range(2):
        with pytest.raises(NotConnectedError, match=r"engine \((169\.254\.169\.254|10\.0\.0\.1)\) is"):
            await dial("engine", guard, _never, resolve)


async def _never(address: Address) -> asyncio.Transport:
    raise AssertionError(f"{address} was called")


async def test_of_several_addresses_the_one_that_is_not_allowed_is_never_called() -> None:
    called: list[str] = []

    async def connect(address: Address) -> asyncio.Transport:
        called.append(str(address))
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing is there")

    async def resolve(host: str) -> list[Address]:
        return [ip_address("169.254.169.254"), ip_address("127.0.0.1"), ip_address("10.0.0.1")]

    def guard(host: str, address: Address | None) -> str | None:
        return refusal(host, address, AllowList(), ())

    with pytest.raises(NotConnectedError):
        await dial("engine", guard, connect, resolve)
    assert called == ["127.0.0.1"]


async def test_an_engine_that_is_no_longer_allowed_is_not_called_after_a_restart(tmp_path: Path) -> None:
    """Its record is in the journal from a time when it was."""
    with serve(answer(200, {})) as server:
        settings = Settings(root=tmp_path, engine_allow=["10.0.0.0/8"])
        async with serving(tmp_path, names=()) as stage:
            engine = connector(
                settings.engine_access, guard_of(settings.operator_hosts, stage.store.engines), lambda _: True
            )(EngineSpec(url=server.url))
            probe = await engine.probe()
            await engine.aclose()
        assert isinstance(probe, Unreached)
        assert "REFITD_ENGINE_ALLOW" in probe.reason
        assert server.seen == []


def anywhere(*_: object) -> None:
    """A guard that lets everything pass."""


async def ask(url: str, key: str | Path | None = "key", guard: Guard | None = anywhere) -> Reply | NoReply:
    transport = Transport(url, api_key=key, admin_key=None, guard=guard)
    return await transport.post("/update_weights_from_disk", {"a": 1}, within=5.0)


async def test_a_redirect_is_not_followed_by_the_service_or_its_client() -> None:
    with serve(answer(200, {})) as inner, serve(answer(307, {}, Location=f"{inner.url}/secret")) as outer:
        reply = await ask(outer.url)
        assert isinstance(reply, Reply)
        assert reply.status == 307
        with (
            RefitClient(outer.url, token="secret") as client,
            pytest.raises(ServiceUnreachableError, match="redirects"),
        ):
            await asyncio.to_thread(client.engines)
        assert inner.seen == []


async def test_proxies_of_the_environment_hear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(answer(502, {})) as proxy, serve(answer(200, {"items": []})) as server:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        for guard in (anywhere, None):
            reply = await ask(server.url, guard=guard)
            assert isinstance(reply, Reply)
            assert reply.ok
        with RefitClient(server.url, token="secret") as client:
            assert (await asyncio.to_thread(client.engines)).items == []
        assert proxy.seen == []
        assert (await asyncio.to_thread(httpx.get, server.url)).status_code == 502  # the trap works


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("allow", [[], ["127.0.0.1"]])
async def test_default_keys_go_only_to_engines_that_the_operator_named(
    tmp_path: Path, source: Source, allow: list[str]
) -> None:
    """Without a token any user of the machine can register a server of their own on loopback."""
    (tmp_path / "key").write_text("secret")
    with serve(answer(200, {})) as server:
        named = [server.url] if source is Source.SETTINGS else []
        settings = Settings(root=tmp_path, engines=named, engine_key_file=tmp_path / "key", engine_allow=allow)
        async with serving(tmp_path, names=()) as stage:
            stage.store.put_engine(EngineRecord(id="e", url=server.url, naming=Naming(source=source)))
            connect = connector(
                settings.engine_access,
                lambda *_: None,
                named_by_operator(settings.operator_hosts, stage.store.engines),
            )
            engine = connect(EngineSpec(url=server.url))
            await engine.probe()
            await engine.aclose()
        sent = server.seen[0].headers.get("authorization")
    is_named = source in {Source.SETTINGS, Source.FILE} or (source is Source.DISCOVERED and bool(allow))
    assert sent == ("Bearer secret" if is_named else None)


async def test_a_key_that_the_engine_refuses_is_not_sent_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("wrong")
    with serve(answer(401, {})) as server:
        reply = await ask(server.url, tmp_path / "key")
        assert isinstance(reply, Reply)
        assert (reply.status, len(server.seen)) == (401, 1)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"two\nlines", b"a b", b"caf\xc3\xa9", b"\xff\xfe"])
async def test_a_key_file_that_holds_no_key_sends_nothing_and_says_nothing_of_what_it_holds(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with serve(answer(200, {})) as server:
        reply = await ask(server.url, file)
        assert isinstance(reply, NoReply)
        assert reply.lost is CallFailure.NEVER_SENT
        assert str(file) in reply.reason
        assert "lines" not in reply.reason
        assert server.seen == []


async def test_key_files_are_not_read_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("key")
    loop_thread = threading.get_ident()
    real = Path.read_text

    def read_text(path: Path, *args: object, **named: object) -> str:
        assert path.name != "key" or threading.get_ident() != loop_thread
        return real(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    settings = Settings(root=tmp_path, engine_key_file=tmp_path / "key")
    with serve(answer(200, {})) as server:
        engine = connector(settings.engine_access, lambda *_: None, lambda _: True)(EngineSpec(url=server.url))
        assert not isinstance(await engine.probe(), Reached)
        await engine.aclose()
        assert server.seen[0].headers["authorization"] == "Bearer key"
