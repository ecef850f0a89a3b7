"""A service with as much to show as there may be: the real API over a store of 1,000 versions and 200 engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI
from playwright.async_api import Page, expect

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.catalog.files import DiskFiles
from refitd.catalog.intake import Intake
from refitd.clock import SystemClock
from refitd.policy.lines import KeptKind
from refitd.settings import Settings
from refitd.state.journal.journal import Journal
from refitd.state.records import AttemptRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan
from support.attackers import QuietServer
from support.records import engine, version

VERSIONS, ENGINES = 1000, 200
STAGES = {"pause": 4.0, "load": 300.0, "verify": 80.0, "resume": 2.0}
EVERY = timedelta(seconds=30)
LOADED = 20  # the newest versions, whose loads there are
REJECTED = VERSIONS - 5


class _Plan:
    """Keeps everything, for as many reasons as there are engines."""

    kept: ClassVar[dict[KeptKind, int]] = {}

    def __init__(self, store: Store) -> None:
        self._store = store

    async def plan(self) -> ReclaimPlan:
        """See `Sweeper`."""
        reasons = [f"engine {name} serves it" for name in self._store.engines]
        items = [
            Reclaimable(path=version.path, keep=True, reasons=reasons, version=version.id, bytes=version.files.bytes)
            for version in self._store.versions.values()
        ]
        return ReclaimPlan(items=items, freed_bytes=0)

    async def run(self) -> ReclaimPlan:
        """See `Sweeper`."""
        return await self.plan()


async def opened(page: Page, server: QuietServer) -> None:
    """Open the dashboard and wait until it has everything."""
    await page.goto(f"http://127.0.0.1:{server.port}/")
    await expect(page.locator("header .link")).to_have_text("live")
    await expect(page.locator("table.log tbody tr").first).to_be_visible()


@asynccontextmanager
async def crowd(tmp_path: Path) -> AsyncIterator[tuple[FastAPI, Store]]:
    """The API, and the store behind it."""
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store)
    _fill(store)
    intake = Intake(store, targets, DiskFiles(tmp_path), tmp_path, lambda *_: None)
    parts: dict[str, Any] = {"intake": intake, "fleet": None, "sweeper": _Plan(store)}
    service = Service(values=Settings(root=tmp_path).api_values, store=store, targets=targets, **parts)
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(journal.run())
        await store.durable()
        try:
            yield build_api(service), store
        finally:
            writing.cancel()
    journal.close()


def _fill(store: Store) -> None:
    store.faults.set(root=None)
    store.faults.set(fleet=None)
    now = datetime.now(UTC)
    for step in range(1, VERSIONS + 1):
        seen = now - (VERSIONS - step) * EVERY
        store.put_version(_version(step, seen), "sealed")
        for number in range(ENGINES) if step > VERSIONS - LOADED else ():
            store.close_attempt(_load(step, number, seen))
    target = f"run~v{VERSIONS:06d}"
    for number in range(ENGINES):
        name = f"gpu-{number:03d}"
        record = engine(name, serving=target, last_attempt=_load(VERSIONS, number, now))
        if number % 2:
            record = record.having(server="vLLM", server_version="0.32.0", proof="answers to a fixed prompt")
        if number % 50 == 7:
            record = record.having(state=EngineState.UNREACHABLE, reason="connection refused", serving="run~v000998")
        store.put_engine(record, "added")
    store.start_update("run", target, "newest good version")


def _version(step: int, seen: datetime) -> VersionRecord:
    """One of every ten is full, the others are deltas; one is rejected."""
    timings = {"publish": 400.0 + step % 7 * 30, "seen": 3.0, "validate": 90.0 + step % 5 * 10} | STAGES
    at, is_full = _text(seen), step % 10 == 0
    if step == REJECTED:
        return version(step, created_at=at, state=VersionState.REJECTED, reason="a tensor has 1 non-finite value")
    return version(
        step,
        created_at=at,
        bytes=3 * 10**9 if is_full else 40 * 10**6 + step % 9 * 10**6,
        kind=Kind.FULL if is_full else Kind.DELTA,
        density=0.01 + step % 9 * 0.002,
        why_full="10 deltas were published since the last full version" if is_full else None,
        served_at=_text(seen + timedelta(seconds=2)),
        timings=timings,
    )


def _load(step: int, number: int, seen: datetime) -> AttemptRecord:
    began = seen + timedelta(milliseconds=200 + number * 5 % 400)
    has_failed = number == 3 and step == VERSIONS - 8
    timings = STAGES | {"load": 300.0 + number * 7 % 120 + step % 5 * 20}
    return AttemptRecord(
        id=f"{step}-{number}",
        engine=f"gpu-{number:03d}",
        version=f"run~v{step:06d}",
        started_at=_text(began),
        outcome="NACK" if has_failed else "ACK",
        reason="the engine refused: out of memory" if has_failed else None,
        kind=Kind.FULL if step % 10 == 0 else Kind.DELTA,
        timings=timings,
    )


def _text(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
