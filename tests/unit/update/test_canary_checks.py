"""A canary's check is its run's own affair, and ends with the version that it is about."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from refitd.clock import SystemClock
from refitd.explain.version import explain_version
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.journal.journal import Journal
from refitd.state.records import CheckState, EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.controller import CanaryChecks, Tell
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import ReclaimPlan
from support.records import engine, version


class Operator:
    """Says yes, but never answers for the runs in `waits`; `let_go` when somebody stopped waiting for that."""

    def __init__(self, *waits: str) -> None:
        self.waits = waits
        self.asked = {run: asyncio.Event() for run in ("a", "b")}
        self.let_go = asyncio.Event()

    async def __call__(self, version: VersionRecord, engine: EngineRecord, tell: Tell) -> str | None:
        self.asked[version.run].set()
        if version.run in self.waits:
            tell("it answered 500")
        if version.run in self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.let_go.set()
        return None


@asynccontextmanager
async def checking(folder: Path, operator: Operator) -> AsyncIterator[tuple[Store, Targets]]:
    """Two runs, each with an engine that is the canary of its second version."""
    journal = Journal(folder)
    store = Store(journal, SystemClock())
    targets = Targets(store, Strategy(name=StrategyName.CANARY))
    for run in ("a", "b"):
        store.put_version(version(1, run=run, served_at="2026-01-01T00:00:00Z"))
        store.put_version(second := version(2, run=run))
        store.put_engine(engine(run, run=run, state=EngineState.IN_SYNC, serving=second.id, known=True))
        store.put_update(replace(store.start_update(run, second.id, "newer"), check=CheckState.PENDING), "rolls")
    task = asyncio.create_task(CanaryChecks(store, targets, [operator]).run())
    try:
        async with asyncio.timeout(10):
            yield store, targets
    finally:
        task.cancel()
        await asyncio.wait({task})
        journal.close()


async def test_a_check_that_takes_its_time_holds_up_no_other_run(tmp_path: Path) -> None:
    async with checking(tmp_path, operator := Operator("a")) as (store, _):
        await operator.asked["a"].wait()
        seen = store.changed.count
        while store.updates["b"].check is not CheckState.PASSED:
            seen = await store.changed.wait_after(seen)
        assert store.updates["a"].check is CheckState.PENDING


async def test_a_check_is_let_go_when_its_version_is_rolled_back_from(tmp_path: Path) -> None:
    async with checking(tmp_path, operator := Operator("a")) as (store, _):
        await operator.asked["a"].wait()
        store.put_version(store.versions[version(2, run="a").id].having(barred=True))
        await operator.let_go.wait()
        assert store.updates["a"].check is CheckState.PENDING


async def test_what_a_check_waits_for_is_told(tmp_path: Path) -> None:
    async with checking(tmp_path, operator := Operator("a")) as (store, targets):
        await operator.asked["a"].wait()
        target = store.versions[version(2, run="a").id]
        sentences = list(explain_version(target, store, targets, ReclaimPlan(items=[], freed_bytes=0)))
        assert any("has not come to an end: it answered 500" in sentence for sentence in sentences)
