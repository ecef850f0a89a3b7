"""The engines that the contract is held against: the embedded one, with and without SGLang's mistakes, SGLang and vLLM,
without the plugin and with it, then vLLM on two ranks as well."""

from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest

from support.habits import HABITS, TORN, Fate
from support.plugged import PluggedSglang
from support.points import taken
from support.servers import SGLANG_VENV, VLLM_VENV, EmbeddedServer, EngineServer
from support.subject import Subject
from support.vllm import OneVllm

REAL = [pytest.param(kind, marks=pytest.mark.sglang) for kind in ("sglang", "sglang-plugged")] if SGLANG_VENV else []
VLLM = ("vllm", "vllm-plugged", "vllm-plugged-two-ranks") if VLLM_VENV else ()
REAL += [pytest.param(kind, marks=pytest.mark.vllm) for kind in VLLM]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """A test of a fate is held against the pairs of engine and checkpoint that meet it: `support.habits`."""
    others: list[Any] = []
    for item in items:
        if (mark := item.get_closest_marker("fate")) is None:
            continue
        kind, model = (item.callspec.params[name] for name in ("kind", "model"))
        if HABITS[kind].fates[model] is not mark.args[0]:
            others.append(item)
        elif _is_thorough(mark.args[0], kind, model):
            item.add_marker(pytest.mark.thorough)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _is_thorough(fate: Fate, kind: str, model: str) -> bool:
    """Whether it costs the restart of a real engine, and `make sglang` or `make vllm` leaves it out.

    Of the checkpoints that end an SGLang `make sglang` takes a third, others with other commits (`support.points`).
    """
    return fate is Fate.DEAD and not HABITS[kind].starts_at_once and model not in taken(TORN)


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
