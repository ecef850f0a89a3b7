"""A lost journal: nothing is collected until the rebuild is done, and no engine is trusted at its word."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.engine.port import Outcome, Refit
from refitd.policy.leases import DEAD_AFTER, EngineView, LeaseKind, Views, leases
from refitd.policy.readiness import waits_for
from refitd.state.journal.journal import Journal
from refitd.state.records import Origin
from refitd.state.store import Store
from refitd_client.contract.states import EngineState, VersionState
from support.checkpoints import publish, tensors
from support.records import engine
from support.services import Stage, serving

LOST = Origin(cause="the journal was corrupt", lost=True, rebuilt=False)
STEPS = range(1, 6)


def view(state: EngineState = EngineState.IN_SYNC, **fields: Any) -> EngineView:
    return EngineView(id="a", run="run", state=state, **fields)


def waits(*states: EngineState, away: float = 0.0, root: str | None = None, fleet: str | None = None) -> str | None:
    engines = {f"e{n}": engine(f"e{n}", state=state, unreachable_since=-away) for n, state in enumerate(states)}
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    known = SimpleNamespace(clock=clock, origin=LOST, faults=SimpleNamespace(root=root, fleet=fleet), engines=engines)
    return waits_for(cast("Store", known))


def test_a_rebuild_waits_for_the_root_the_fleet_and_each_engine() -> None:
    assert waits(EngineState.IN_SYNC, root="the root cannot be listed") == "the root cannot be listed"
    assert waits(EngineState.IN_SYNC, fleet="the engines file cannot be used") == "the engines file cannot be used"
    assert waits(EngineState.IN_SYNC, EngineState.PROBING) == "engine e1 has not answered yet"
    assert "cannot be reached" in (waits(EngineState.UNREACHABLE, away=DEAD_AFTER - 1) or "")


def test_a_rebuild_does_not_wait_for_the_dead_nor_for_those_that_answered_badly() -> None:
    assert waits() is None
    assert waits(EngineState.UNREACHABLE, away=DEAD_AFTER) is None
    assert waits(EngineState.TAINTED, EngineState.QUARANTINED, EngineState.BEHIND) is None


def test_a_folder_that_an_engine_names_is_leased_until_the_engine_is_dead() -> None:
    named = leases(Views(engines=(view(EngineState.TAINTED, named=("v1",)),)))
    assert [lease.kind for lease in named["v1"]] == [LeaseKind.NAMED]
    assert leases(Views(engines=(view(EngineState.UNREACHABLE, named=("v1",), unreachable_for=DEAD_AFTER),))) == {}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Five versions on disk, and a journal that lost all that it knew of them."""
    for step in STEPS:
        publish(tmp_path / "root", "run", step, tensors(step))
    Journal(tmp_path / "state", LOST).close()
    return tmp_path


async def reclaimed(stage: Stage) -> tuple[set[int], set[str]]:
    """Sweep; the steps that are left, and the reasons why."""
    plan = (await stage.http.post("/v1/reclaim")).raise_for_status().json()
    left = {int(path.name[1:]) for path in (stage.root / "run").glob("v*")}
    return left, {reason for item in plan["items"] if item["keep"] for reason in item["reasons"]}


async def sealed(stage: Stage) -> None:
    for step in STEPS:
        await stage.until(f"run~v{step:06d}", lambda record: record.state is VersionState.SEALED)


async def engine_is(stage: Stage, *states: EngineState) -> None:
    seen = stage.store.changed.count
    async with asyncio.timeout(10):
        while "a:1" not in stage.store.engines or stage.store.engines["a:1"].state not in states:
            seen = await stage.store.changed.wait_after(seen, within=0.05)


async def test_nothing_is_collected_until_the_rebuild_is_done(job: Path) -> None:
    async with serving(job) as stage:
        engine = stage.engines["a"]
        engine.down = True
        await sealed(stage)
        await engine_is(stage, EngineState.UNREACHABLE)
        left, reasons = await reclaimed(stage)
        assert left == set(STEPS)
        assert all("is being rebuilt: engine a:1 cannot be reached" in reason for reason in reasons)
        engine.down = False
        await engine_is(stage, EngineState.IN_SYNC)
        left, _ = await reclaimed(stage)
        assert left == {4, 5}


async def test_the_trash_and_abandoned_folders_wait_for_the_rebuild_as_well(job: Path) -> None:
    trash = job / "root" / ".refitd" / "trash" / ("0" * 32)
    trash.mkdir(parents=True)
    async with serving(job) as stage:
        stage.engines["a"].down = True
        await sealed(stage)
        await reclaimed(stage)
        assert trash.exists()


async def test_an_engine_is_loaded_and_proved_after_the_journal_was_lost_whatever_it_says(job: Path) -> None:
    async with serving(job) as stage:
        engine = stage.engines["a"]
        engine.path, engine.label, engine.paused = str(job / "root/run/v000005"), "5", True
        await engine_is(stage, EngineState.TAINTED)
        await stage.until("run~v000005", lambda record: record.served_at is not None)
        assert engine.loads[-1] == str(job / "root/run/v000005")
        assert not engine.paused


async def test_an_engine_whose_contents_the_lost_journal_vouched_for_is_not_resumed_before_it_is_proved(
    job: Path,
) -> None:
    async with serving(job) as stage:
        engine = stage.engines["a"]
        engine.paused = True
        engine.script = [Refit(outcome=Outcome.TAINTED, resumed=False, reason="Rolling back") for _ in range(4)]
        await sealed(stage)
        await engine_is(stage, EngineState.TAINTED, EngineState.QUARANTINED)
        assert engine.resumes == 0
        assert engine.paused


async def test_the_version_that_an_engine_names_stays_though_nothing_proves_that_it_is_served(job: Path) -> None:
    async with serving(job) as stage:
        engine = stage.engines["a"]
        engine.path, engine.label = "/elsewhere/run/v000001", "1"
        engine.script = [Refit(outcome=Outcome.TAINTED, resumed=False, reason="Rolling back")] * 20
        await sealed(stage)
        await engine_is(stage, EngineState.TAINTED)
        left, reasons = await reclaimed(stage)
        assert 1 in left
        assert any("names its folder" in reason for reason in reasons)
        assert 3 not in left


async def test_an_engine_that_joins_after_the_rebuild_is_taken_at_its_word(job: Path) -> None:
    async with serving(job) as stage:
        stage.store.rebuilt()
        (await stage.http.post("/v1/engines", json={"url": "http://b:1"})).raise_for_status()
        assert stage.store.engines["b:1"].known
