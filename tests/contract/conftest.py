"""The engines that the contract is held against: the embedded one, with and without SGLang's mistakes, and SGLang."""

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from refitd.engine.sglang.adapter import SglangEngine
from support.servers import ADMIN_KEY, API_KEY, SGLANG_VENV, EmbeddedServer, EngineServer
from support.subject import Subject

REAL = [pytest.param("sglang", marks=pytest.mark.sglang)] if SGLANG_VENV else []


@pytest.fixture(scope="session", params=["embedded", "embedded-defects", *REAL])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def server(
    kind: str, models: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[EngineServer]:
    """An engine on model_a."""
    if kind == "sglang":
        yield request.getfixturevalue("sglang")
        return
    flags = ["--defects"] if kind == "embedded-defects" else []
    with EmbeddedServer(tmp_path_factory.mktemp(kind), models / "model_a", *flags) as embedded:
        yield embedded


@pytest.fixture
async def subject(kind: str, server: EngineServer, models: Path) -> AsyncIterator[Subject]:
    """The engine, up and generating; restarted when the test before has killed it."""
    if not server.is_running:
        server.restart()
    subject = Subject(kind, server, SglangEngine(server.url, api_key=API_KEY, admin_key=ADMIN_KEY), models)
    try:
        yield subject
    finally:
        await subject.engine.aclose()
