"""The whole service in one process, with its real parts and engines in memory, behind a real HTTP client."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.catalog.catalog import Catalog
from refitd.catalog.examining import References
from refitd.catalog.files import DiskFiles
from refitd.catalog.intake import Intake
from refitd.clock import SystemClock
from refitd.engine.registry import EngineSpec
from refitd.reclaim.books import Books
from refitd.reclaim.folders import DiskFolders
from refitd.reclaim.sweep import Collector
from refitd.settings import Settings
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.controller import CanaryCheck, CanaryChecks, OperatorCheck, UpdateController
from refitd.update.fleet import Fleet
from refitd.update.proving import RankProofs
from refitd.update.targets import Targets
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState, VersionState
from refitd_hosts.hub.hub import Hub
from refitd_hosts.hub.reported import ReportedHosts
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.materializer import Materializer

from .checkpoints import publish, tensors, write_model
from .simulated_engine import SimulatedEngine


@dataclass
class Stage:
    """What a test works with: `http` speaks to the API, which is `api`; `engines` are by host name."""

    root: Path
    store: Store
    targets: Targets
    http: httpx.AsyncClient
    engines: dict[str, SimulatedEngine]
    api: FastAPI
    materializer: Materializer
    sweep: Callable[[], Awaitable[Any]]
    catalog: Catalog

    async def listed(self) -> None:
        """Wait until the service knows what is in the root."""
        async with asyncio.timeout(10):
            while self.store.faults.root is not None:
                await self.store.changed.wait_after(self.store.changed.count, within=0.02)

    async def served(self, step: int) -> str:
        """Publish a step, wait until it is served, return its id."""
        publish(self.root, "run", step, tensors(step))
        id_ = f"run~v{step:06d}"
        await self.until(id_, lambda record: record.served_at is not None)
        return id_

    async def until(self, id_: str, what: Any) -> None:
        """Wait for something to become true of a version."""
        seen = self.store.changed.count
        async with asyncio.timeout(10):
            while id_ not in self.store.versions or not what(self.store.versions[id_]):
                seen = await self.store.changed.wait_after(seen, within=0.05)

    async def until_engines(self) -> None:
        """Wait until every engine was reached."""
        async with asyncio.timeout(10):
            while any(engine.state is EngineState.PROBING for engine in self.store.engines.values()):
                await self.store.changed.wait_after(self.store.changed.count, within=0.02)

    async def rejected(self, id_: str) -> None:
        """Wait until a version is rejected."""
        await self.until(id_, lambda record: record.state is VersionState.REJECTED)


@asynccontextmanager
async def serving(
    tmp_path: Path, *, token: str | None = None, names: tuple[str, ...] = ("a",), **more: Any
) -> AsyncIterator[Stage]:
    """Run the service on `names` engines, with a base model that `tensors` fits. `more` are settings."""
    root = tmp_path / "root"
    (root / SERVICE_FOLDER).mkdir(parents=True, exist_ok=True)
    engines = {name: SimulatedEngine() for name in names}
    defaults: dict[str, Any] = {
        "root": root,
        "engines": [f"http://{name}:1" for name in names],
        "engine_allow": ["b"],
        "base_model": write_model(tmp_path / "base"),
        "token": None if token is None else SecretStr(token),
        "scan_interval": 0.02,
        "probe_interval": 0.05,
        "keep_last": 2,
    }
    if (read_token := more.pop("read_token", None)) is not None:
        more["read_token_file"] = tmp_path / "read-token"
        more["read_token_file"].write_text(read_token)
    settings = Settings(**(defaults | more))
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store, settings.strategy)
    files = DiskFiles(root)
    proofs = RankProofs(store, targets, settings.prove)
    catalog = Catalog(store, files, References(store, settings.base_model), settings.catalog_rules, proofs)

    def connect(spec: EngineSpec) -> SimulatedEngine:
        name = spec.url.removeprefix("http://").removesuffix(":1")
        return engines.setdefault(name, SimulatedEngine())

    led = ReportedHosts(store, store.clock, None)
    facts = Books(store, targets, files, catalog.judging)
    materializer = Materializer(store, targets, facts, DiskCopies(root))
    fleet = Fleet(
        store,
        targets,
        root=str(root),
        urls=settings.engines,
        engines_file=None,
        probe_interval=settings.probe_interval,
        connect=led.connector(connect, root=str(root), load_timeout=60),
        check=materializer.checking(catalog.check),
        prove=catalog.read,
        proofs=proofs,
        chance=random.Random(),
    )
    collector = Collector(store, facts, DiskFolders(root), settings.reclaim_rules, materializer)
    intake = Intake(
        store, targets, files, root, catalog.nudge, settings.run, kind=settings.kind, deltas=settings.takes_deltas
    )
    service = Service(
        values=settings.api_values,
        store=store,
        targets=targets,
        intake=intake,
        fleet=fleet,
        sweeper=collector.sweeper,
        copies=materializer,
        hosts=Hub(store, led),
    )
    led.tell, fleet.forget_host = fleet.reported, led.forget
    api = build_api(service)
    transport = httpx.ASGITransport(app=api, raise_app_exceptions=False)
    controller = UpdateController(store, targets, default_run=settings.run, quorum=1)
    checks: list[CanaryCheck] = [fleet.trial]
    if settings.canary_check is not None:
        checks.append(OperatorCheck(settings.canary_check))
    canaries = CanaryChecks(store, targets, checks)
    async with (
        asyncio.TaskGroup() as group,
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        parts = (catalog.run, controller.run, canaries.run, materializer.run, fleet.run)
        tasks = [group.create_task(part()) for part in parts]
        writing = group.create_task(journal.run())
        await asyncio.sleep(0)  # each has begun
        try:
            yield Stage(root, store, targets, http, engines, api, materializer, collector.sweeper.run, catalog)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            writing.cancel()
    journal.close()


@asynccontextmanager
async def at_a_port(stage: Stage) -> AsyncIterator[str]:
    """The service for clients and commands in other threads; its URL."""
    server = uvicorn.Server(uvicorn.Config(stage.api, port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
