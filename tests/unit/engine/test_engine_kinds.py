"""Which adapter speaks to an engine: the one of the kind that the operator says, or whose probe reaches it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from refitd.engine.kind import EngineAccess, EngineKind, EngineServer
from refitd.engine.port import EnginePort, Reached, Unreached
from refitd.engine.registry import (
    KINDS,
    PAUSE_MODES,
    EnginesFileError,
    EngineSpec,
    check_engine,
    connector,
    named_engines,
    parse_engines,
)
from refitd.settings import Settings
from support.scripted_server import Step, answer
from support.scripted_vllm import DEAD, error, scripted_vllm
from support.sockets import free_port

ACCESS = EngineAccess(root=Path("/root"), load_timeout=1, pause_mode="auto")


class Answering:
    """An adapter that answers probes and resumes; the other calls are not made here."""

    def __init__(self, name: str, server: dict[str, str]) -> None:
        self._name = name
        self._server = server
        self.probes = self.resumes = 0

    async def probe(self) -> Reached | Unreached:
        self.probes += 1
        if self._server["is"] == f"old {self._name}":
            return Unreached(reason="too old", advice="install a newer one", recognised=True)
        if self._server["is"] != self._name:
            return Unreached(reason="no server is there" if self._server["is"] == "down" else f"no {self._name}")
        return Reached(
            model_path="/m", weight_version=None, server_version="1", configuration=self._name, startup_path=None
        )

    async def resume(self) -> bool:
        self.resumes += 1
        return True

    async def aclose(self) -> None:
        self._server.setdefault("closed", "")
        self._server["closed"] += self._name


def fleet(server: dict[str, str]) -> tuple[dict[str, Answering], Any]:
    """Adapters of two kinds by name, and what connects to the server."""
    adapters = {name: Answering(name, server) for name in ("first", "second")}

    def kind(name: str) -> EngineKind:
        def connect(_: EngineServer) -> EnginePort:
            return cast("EnginePort", adapters[name])

        return EngineKind(name=name, inside="", pause_modes=("abort",), connect=connect)

    return adapters, connector(ACCESS, lambda *_: None, lambda _: True, kinds=[kind(name) for name in adapters])


async def test_the_adapter_whose_probe_reaches_the_server_speaks_to_it() -> None:
    adapters, connect = fleet({"is": "second"})
    engine = connect(EngineSpec(url="http://a:1"))
    for _ in range(2):
        seen = await engine.probe()
        assert isinstance(seen, Reached)
        assert seen.configuration == "second"
    assert await engine.resume()
    assert {name: (each.probes, each.resumes) for name, each in adapters.items()} == {"first": (1, 0), "second": (2, 1)}


async def test_where_nothing_listens_one_kind_is_asked_and_that_is_said_once() -> None:
    port = free_port()
    seen = await connector(ACCESS, lambda *_: None, lambda _: True)(EngineSpec(url=f"http://127.0.0.1:{port}")).probe()
    refused = f"http://127.0.0.1:{port} cannot be reached: connection refused (is the engine running there?)"
    assert isinstance(seen, Unreached)
    assert seen.reason == refused


async def test_a_call_before_the_first_probe_goes_to_the_adapter_of_the_server_as_well() -> None:
    """A service that was killed in mid-load repairs the engine before it probes it."""
    server = {"is": "down"}
    adapters, connect = fleet(server)
    engine = connect(EngineSpec(url="http://a:1"))
    await engine.resume()
    server["is"] = "second"
    await engine.resume()
    await engine.resume()
    assert {name: (each.probes, each.resumes) for name, each in adapters.items()} == {"first": (2, 1), "second": (2, 2)}


async def test_a_server_that_another_kind_replaced_gets_its_adapter() -> None:
    server = {"is": "first"}
    adapters, connect = fleet(server)
    engine = connect(EngineSpec(url="http://a:1"))
    await engine.probe()
    server["is"] = "second"
    assert isinstance(await engine.probe(), Reached)
    await engine.resume()
    assert adapters["second"].resumes == 1


@pytest.mark.parametrize(("state", "reason"), [("down", "no server is there"), ("other", "no first; no second")])
async def test_an_engine_that_no_adapter_reaches_says_why_and_is_closed_whole(state: str, reason: str) -> None:
    server = {"is": state}
    _, connect = fleet(server)
    engine = connect(EngineSpec(url="http://a:1"))
    assert await engine.probe() == Unreached(reason=reason)
    await engine.aclose()
    assert server["closed"] == "firstsecond"


async def test_what_the_adapter_says_that_recognises_the_server_counts() -> None:
    _, connect = fleet({"is": "old second"})
    seen = await connect(EngineSpec(url="http://a:1")).probe()
    assert seen == Unreached(reason="too old", advice="install a newer one", recognised=True)


async def test_of_a_server_that_was_reached_only_its_own_adapter_says_why_it_does_not_answer() -> None:
    server = {"is": "second"}
    _, connect = fleet(server)
    engine = connect(EngineSpec(url="http://a:1"))
    assert isinstance(await engine.probe(), Reached)
    server["is"] = "in trouble"
    seen = await engine.probe()
    assert seen == Unreached(reason="no second")


@pytest.mark.parametrize(
    ("route", "reply", "reason"),
    [
        ("/weight_info", error(500, DEAD), "its engine has died: restart it"),
        ("/server_info", answer(200, {"vllm_config": None}), "/server_info has another form"),
    ],
)
async def test_a_vllm_that_cannot_be_driven_is_not_said_to_lack_the_routes_of_sglang(
    route: str, reply: Step, reason: str
) -> None:
    with scripted_vllm(absent=frozenset({"/model_info", "/health"})) as vllm:
        vllm.on(route, reply)
        engine = connector(ACCESS, lambda *_: None, lambda _: True)(EngineSpec(url=vllm.url))
        seen = await engine.probe()
        await engine.aclose()
    assert isinstance(seen, Unreached)
    assert reason in seen.reason
    assert "/model_info" not in seen.reason
    assert "SGLang" not in seen.reason + seen.advice


@pytest.mark.parametrize(
    ("root", "path_map", "there"), [(None, None, "/root"), (None, "/mnt/all", "/mnt/all"), ("/one", "/mnt/all", "/one")]
)
def test_an_adapter_is_told_where_its_server_sees_the_root(root: str | None, path_map: str | None, there: str) -> None:
    servers: list[EngineServer] = []

    def connect(server: EngineServer) -> EnginePort:
        servers.append(server)
        return cast("EnginePort", Answering("one", {}))

    kind = EngineKind(name="one", inside="", pause_modes=("abort",), connect=connect)
    access = replace(ACCESS, path_map=path_map)
    connector(access, lambda *_: None, lambda _: True, kinds=[kind])(EngineSpec(url="http://a:1", root=root))
    assert [server.root for server in servers] == [there]


def test_the_adapter_of_a_kind_that_is_said_is_the_only_one() -> None:
    adapters, connect = fleet({"is": "first"})
    spec = EngineSpec.model_construct(url="http://a:1", engine="second")
    assert connect(spec) is adapters["second"]


def test_the_kind_is_said_before_the_url_or_in_the_engines_file(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path, engines=["sglang=http://a:1/", "http://b:2"])
    assert settings.engines == ["sglang=http://a:1", "http://b:2"]
    said = {name: (spec.url, spec.engine) for name, spec in settings.engine_specs.items()}
    assert said == {"a:1": ("http://a:1", "sglang"), "b:2": ("http://b:2", None)}
    assert settings.operator_hosts.engines == ("http://a:1", "http://b:2")
    (spec,) = parse_engines("[{url: http://a:1, engine: sglang}]")
    assert named_engines([check_engine("sglang=http://a:1")])["a:1"].engine == spec.engine == "sglang"


def test_a_kind_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="'other' is no kind of engine: use sglang or vllm, or none"):
        Settings(root=tmp_path, engines=["other=http://a:1"])
    with pytest.raises(EnginesFileError, match="'other' is no kind of engine"):
        parse_engines("[{url: http://a:1, engine: other}]")


def test_a_pause_mode_is_one_of_some_kind(tmp_path: Path) -> None:
    assert set(PAUSE_MODES) == {"auto", *(mode for kind in KINDS for mode in kind.pause_modes)}
    assert all(Settings(root=tmp_path, pause_mode=mode).pause_mode == mode for mode in PAUSE_MODES)
    with pytest.raises(ValidationError, match=rf"'sleep' is no pause mode: use auto, .* or {PAUSE_MODES[-1]}"):
        Settings(root=tmp_path, pause_mode="sleep")
