"""A store, a controller and a fleet of simulated engines, as they run in the service."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from refitd.clock import SystemClock
from refitd.engine.registry import EngineSpec
from refitd.policy.strategy import Strategy
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.controller import CanaryChecks, UpdateController
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets

from .simulated_engine import SimulatedEngine

ALL = Strategy()


@dataclass
class Stage:
    """What a test works with."""

    store: Store
    targets: Targets
    fleet: Fleet
    engines: dict[str, SimulatedEngine]
    lost: set[str] = field(default_factory=set)

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait for something to become true in the store."""
        seen = self.store.changed.count
        async with asyncio.timeout(10):
            while not what():
                seen = await self.store.changed.wait_after(seen, within=0.05)


@asynccontextmanager
async def running(
    folder: Path,
    engines: dict[str, SimulatedEngine],
    *,
    probe_interval: float = 0.02,
    quorum: int = 1,
    strategy: Strategy = ALL,
    engines_file: Path | None = None,
) -> AsyncIterator[Stage]:
    """Run a fleet on `engines` (by host name), or on those of them that a file names, with a journal in `folder`."""
    journal = Journal(folder)
    store = Store(journal, SystemClock())
    targets = Targets(store, strategy)
    lost: set[str] = set()

    async def check(version: VersionRecord, *, in_place: bool = False) -> bool:
        return version.id not in lost

    def connect(spec: EngineSpec) -> SimulatedEngine:
        return engines[spec.url.removeprefix("http://").removesuffix(":1")]

    fleet = Fleet(
        store,
        targets,
        root="/root",
        urls=[] if engines_file is not None else [f"http://{name}:1" for name in engines],
        engines_file=engines_file,
        probe_interval=probe_interval,
        connect=connect,
        check=check,
        chance=random.Random(),
    )
    canaries = CanaryChecks(store, targets, [fleet.trial])
    controller = UpdateController(store, targets, default_run=None, quorum=quorum)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part()) for part in (controller.run, canaries.run, fleet.run)]
        writing = group.create_task(journal.run())
        try:
            stage = Stage(store=store, targets=targets, fleet=fleet, engines=engines, lost=lost)
            await stage.until(lambda: engines_file is not None or len(store.engines) == len(engines))
            yield stage
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            writing.cancel()
    journal.close()
