"""The engines that the contract is held against: the embedded one, with and without SGLang's mistakes, SGLang and vLLM,
without the plugin and with it, vLLM on two ranks as well."""

from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest

from support.habits import HABITS, Fate
from support.plugged import PluggedSglang
from support.servers import SGLANG_VENV, VLLM_VENV, EmbeddedServer, EngineServer
from support.subject import Subject
from support.vllm import OneVllm

REAL = [pytest.param(kind, marks=pytest.mark.sglang) for kind in ("sglang", "sglang-plugged")] if SGLANG_VENV else []
VLLM = ("vllm", "vllm-two-ranks", "vllm-plugged", "vllm-plugged-two-ranks") if VLLM_VENV else ()
REAL += [pytest.param(kind, marks=pytest.mark.vllm) for kind in VLLM]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """A test of a fate is held against the pairs of engine and checkpoint that meet it: `support.habits`.

    Where each failure costs a restart of two ranks, all but one are for `-m vllm`, which leaves out nothing.
    """
    others: list[Any] = []
    for item in items:
        if (mark := item.get_closest_marker("fate")) is None:
            continue
        kind, model = (item.callspec.params[name] for name in ("kind", "model"))
        if HABITS[kind].fates[model] is not mark.args[0]:
            others.append(item)
        elif mark.args[0] is Fate.LOST and not HABITS[kind].loads_again and model != "nowhere":
            item.add_marker(pytest.mark.thorough)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session", params=["embedded", "embedded-defects", *REAL])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def server(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[EngineServer]:
    """An engine on model_a."""
    if not kind.startswith("embedded"):
        yield request.getfixturevalue(kind.replace("-", "_"))
        return
    models = request.getfixturevalue("models")
    flags = ["--defects"] if kind == "embedded-defects" else []
    with EmbeddedServer(tmp_path_factory.mktemp(kind), models / "model_a", *flags) as embedded:
        yield embedded


@pytest.fixture
async def subject(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """The engine, up and generating; restarted when the test before has killed it."""
    if kind.startswith("vllm"):
        one: OneVllm = request.getfixturevalue("one_vllm")
        subject = one.subject(kind)
    else:
        server: EngineServer = request.getfixturevalue("server")
        if not server.is_running:
            server.restart()
        root = server.root if isinstance(server, PluggedSglang) else None
        subject = Subject(kind, server, request.getfixturevalue("models"), root=root)
    try:
        yield subject
    finally:
        await subject.engine.aclose()
