"""Two servers that say that they prefill and decode, behind the adapter for units: what both hold, who generates."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from refitd.engine.kind import EngineAccess
from refitd.engine.port import EnginePort, Outcome, Target
from refitd.engine.registry import EngineSpec, connector
from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.server import ReplicaServer, create_app
from refitd_embedded.weights import CheckpointError, Write
from support.embedded_kit import checkpoint, open_engine
from support.subject import ignore_stage


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "c")):
        checkpoint(root / name, seed)
    return root


class Refusing:
    """A loader to which no checkpoint is good."""

    def open(self, directory: Path) -> Write:
        """See `CheckpointLoader`."""
        raise CheckpointError(f"{directory} cannot be read here")


@asynccontextmanager
async def listening(engine: EmbeddedEngine, role: str) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, launch={"disaggregation_mode": role})
    server = ReplicaServer(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@asynccontextmanager
async def pair(models: Path, **options: bool) -> AsyncIterator[tuple[list[EmbeddedEngine], list[str], EnginePort]]:
    """A prefill and a decode server on model `a`, and the adapter that the engines file makes of them."""
    engines = [open_engine(models / "a", **options) for _ in range(2)]
    access = EngineAccess(root=models, load_timeout=60.0, pause_mode="auto")
    connect = connector(access, lambda *_: None, lambda _: True)
    async with AsyncExitStack() as stack:
        roles = zip(engines, ("prefill", "decode"), strict=True)
        urls = [await stack.enter_async_context(listening(engine, role)) for engine, role in roles]
        adapter = connect(EngineSpec(url=urls[0], pair=(urls[1],)))
        stack.push_async_callback(adapter.aclose)
        yield engines, urls, adapter


async def test_half_a_load_leaves_both_paused_and_a_repair_brings_both_back(models: Path) -> None:
    async with pair(models) as (engines, urls, adapter):
        loaded = await adapter.refit(Target(path=str(models / "b"), label="1"), ignore_stage)
        assert loaded.outcome is Outcome.ACK
        loader, engines[1].reloader.loader = engines[1].reloader.loader, Refusing()
        done = await adapter.refit(Target(path=str(models / "c"), label="2"), ignore_stage)
        assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
        assert urls[1] in (done.reason or "")
        assert [engine.paused for engine in engines] == [True, True]
        engines[1].reloader.loader = loader
        back = Target(path=str(models / "b"), label="1", fingerprint=loaded.fingerprint, repairs=True)
        done = await adapter.refit(back, ignore_stage)
        assert (done.outcome, done.resumed) == (Outcome.ACK, True)
        assert [engine.paused for engine in engines] == [False, False]
