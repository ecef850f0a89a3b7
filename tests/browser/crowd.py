"""A service with as much to show as there may be: the real API over a store of 1,000 versions and 200 engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.clock import SystemClock
from refitd.policy.lines import KeptFor
from refitd.rollout.targets import Targets
from refitd.settings import Settings
from refitd.state.journal.journal import Journal
from refitd.state.records import AttemptRecord
from refitd.state.store import Store
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan
from support.records import engine, version

VERSIONS, ENGINES = 1000, 200
STAGES = {"pause": 4.0, "load": 300.0, "verify": 80.0, "resume": 2.0}


class _Plan:
    """Keeps everything, for as many reasons as there are engines."""

    kept: ClassVar[dict[KeptFor, int]] = {}

    def __init__(self, store: Store) -> None:
        self._store = store

    async def plan(self) -> ReclaimPlan:
        """See `Sweeper`."""
        reasons = [f"engine {name} serves it" for name in self._store.engines]
        items = [
            Reclaimable(path=version.path, keep=True, reasons=reasons, version=version.id, bytes=version.bytes)
            for version in self._store.versions.values()
        ]
        return ReclaimPlan(items=items, freed_bytes=0)

    async def run(self) -> ReclaimPlan:
        """See `Sweeper`."""
        return await self.plan()


@asynccontextmanager
async def crowd(tmp_path: Path) -> AsyncIterator[tuple[FastAPI, Store]]:
    """The API, and the store behind it."""
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store)
    _fill(store)
    parts: dict[str, Any] = {"intake": None, "fleet": None, "sweeper": _Plan(store)}
    service = Service(settings=Settings(root=tmp_path), store=store, targets=targets, **parts)
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(journal.run())
        await store.durable()
        try:
            yield build_api(service), store
        finally:
            writing.cancel()
    journal.close()


def _fill(store: Store) -> None:
    store.faults.set_root(None)
    store.faults.set_fleet(None)
    now = store.clock.now()
    for step in range(1, VERSIONS + 1):
        timings = {"publish": 400.0, "seen": 3.0, "validate": 90.0} | STAGES
        store.put_version(version(step, created_at=now, bytes=3 * 10**9, served_at=now, timings=timings), "sealed")
    target = f"run~v{VERSIONS:06d}"
    for number in range(ENGINES):
        name = f"gpu-{number:03d}"
        load = AttemptRecord(id=name, engine=name, version=target, started_at=now, outcome="ACK", timings=STAGES)
        store.close_attempt(load)
        record = engine(name, serving=target, last_attempt=load)
        if number % 2:
            record = replace(record, server="vLLM", release="0.32.0", proof="answers to a fixed prompt")
        if number % 50 == 7:
            record = replace(record, state=EngineState.UNREACHABLE, reason="connection refused", serving="run~v000998")
        store.put_engine(record, "added")
    store.start_rollout("run", target, "newest good version")
