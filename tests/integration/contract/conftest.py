"""The engines that the contract is held against: the embedded one, with and without SGLang's mistakes, and SGLang,
without the plugin and with it."""

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from support.plugged import PluggedSglang
from support.servers import SGLANG_VENV, EmbeddedServer, EngineServer
from support.subject import Subject

REAL = [pytest.param(kind, marks=pytest.mark.sglang) for kind in ("sglang", "sglang-plugged")] if SGLANG_VENV else []


@pytest.fixture(scope="session", params=["embedded", "embedded-defects", *REAL])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def server(
    kind: str, models: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[EngineServer]:
    """An engine on model_a."""
    if kind.startswith("sglang"):
        yield request.getfixturevalue(kind.replace("-", "_"))
        return
    flags = ["--defects"] if kind == "embedded-defects" else []
    with EmbeddedServer(tmp_path_factory.mktemp(kind), models / "model_a", *flags) as embedded:
        yield embedded


@pytest.fixture
async def subject(kind: str, server: EngineServer, models: Path) -> AsyncIterator[Subject]:
    """The engine, up and generating; restarted when the test before has killed it."""
    if not server.is_running:
        server.restart()
    subject = Subject(kind, server, models, root=server.root if isinstance(server, PluggedSglang) else None)
    try:
        yield subject
    finally:
        await subject.engine.aclose()
