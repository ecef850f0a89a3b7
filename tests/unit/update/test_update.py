"""Updates at work: reconcilers and controller on engines in memory, with a real journal."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from refitd.engine.port import Outcome, Refit
from refitd.policy.traffic import is_proven
from refitd.problem import ProblemError
from refitd.state.journal.journal import JournalError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.states import EngineState, UpdateState, VersionState
from support.fleets import running
from support.records import version
from support.simulated_engine import SimulatedEngine

A, B = "a:1", "b:1"
TAINTED = Refit(outcome=Outcome.TAINTED, resumed=False, reason="the reply was lost")


def two() -> dict[str, SimulatedEngine]:
    return {"a": SimulatedEngine(), "b": SimulatedEngine()}


async def test_newest_wins_and_skipped_versions_are_counted(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        for step in (2, 3, 4):
            stage.store.put_version(version(step))
        await stage.until(lambda: stage.store.engines[A].serving == version(4).id)
        assert engine.loads == ["/root/run/v000001", "/root/run/v000004"]
        assert stage.store.engines[A].contents.skipped == 2


async def test_a_version_that_is_overtaken_as_it_is_proven_was_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a good one to go back to, though nobody looked before the next one came."""
    real = Store.put_engine

    def and_overtake(store: Store, engine: EngineRecord, why: str) -> None:
        real(store, engine, why)
        if engine.state is EngineState.IN_SYNC and engine.serving == version(1).id:
            monkeypatch.setattr(Store, "put_engine", real)
            store.put_version(version(2))

    monkeypatch.setattr(Store, "put_engine", and_overtake)
    async with running(tmp_path, {"a": SimulatedEngine()}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: version(2).id in stage.store.versions)
        await stage.until(lambda: stage.store.versions[version(2).id].served_at is not None)
        assert stage.store.versions[version(1).id].served_at is not None


async def test_steps_out_of_order_never_take_an_engine_backwards(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(9))
        await stage.until(lambda: stage.store.engines[A].serving == version(9).id)
        stage.store.put_version(version(8))
        stage.store.put_version(version(10))
        await stage.until(lambda: stage.store.engines[A].serving == version(10).id)
        assert "/root/run/v000008" not in engine.loads


async def test_an_engine_that_restarts_is_brought_up_again_unasked(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        engine.restart()
        await stage.until(lambda: len(engine.loads) == 2 and stage.store.engines[A].state is EngineState.IN_SYNC)
        assert engine.label == "1"


async def test_an_engine_that_is_down_holds_up_only_itself(tmp_path: Path) -> None:
    engines = two()
    engines["b"].down = True
    async with running(tmp_path, engines) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        assert stage.store.updates["run"].state is UpdateState.DEGRADED
        engines["b"].restart()
        await stage.until(lambda: stage.store.engines[B].serving == version(1).id)


async def test_an_engine_that_was_out_of_reach_for_a_while_is_not_loaded_again(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        engine.down = True
        probed = engine.probes
        await stage.until(lambda: engine.probes > probed + 3)
        away = stage.store.engines[A]
        assert (away.state, away.serving) == (EngineState.UNREACHABLE, version(1).id)
        engine.down = False
        await stage.until(lambda: stage.store.engines[A].state is EngineState.IN_SYNC)
        assert engine.loads == ["/root/run/v000001"]


async def test_a_resume_that_was_lost_is_sent_again(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    engine.script = [Refit(outcome=Outcome.ACK, resumed=False)]
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: engine.resumes > 0 and not stage.store.engines[A].debts.resume_owed)
        assert not engine.paused


async def test_files_that_changed_since_they_were_sealed_are_not_loaded(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        await stage.until(lambda: A in stage.store.engines)
        stage.lost.add(version(1).id)
        stage.store.put_version(version(1))
        await stage.until(lambda: A in stage.store.loading)
        await stage.until(lambda: A not in stage.store.loading)
        assert stage.store.engines[A].state is EngineState.BEHIND
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.engines[A].serving == version(2).id)
        assert engine.loads == ["/root/run/v000002"]


async def test_an_engine_that_is_removed_in_mid_update_ends_its_task_and_no_other(tmp_path: Path) -> None:
    engines = two()
    async with running(tmp_path, engines) as stage:
        engines["b"].gate = asyncio.Event()
        stage.store.put_version(version(1))
        await stage.until(lambda: engines["b"].loads != [])
        stage.store.drop_engine(B)
        engines["b"].gate.set()
        await stage.until(lambda: engines["b"].closed)
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        assert B not in stage.store.engines
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.engines[A].serving == version(2).id)


async def test_files_that_are_deleted_after_the_load_take_no_engine_backwards(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        for step in (1, 2):
            stage.store.put_version(version(step))
            await stage.until(lambda step=step: stage.store.versions[version(step).id].served_at is not None)
        served = stage.store.versions[version(2).id]
        stage.store.put_version(replace(served, state=VersionState.LOST))
        engine.restart()
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        assert engine.loads == [f"/root/run/v00000{step}" for step in (1, 2, 1)]


async def test_a_resync_takes_no_engine_back_to_an_older_version_unsaid(tmp_path: Path) -> None:
    async with running(tmp_path, {"a": SimulatedEngine()}) as stage:
        for step in (1, 2):
            stage.store.put_version(version(step))
            await stage.until(lambda step=step: stage.store.versions[version(step).id].served_at is not None)
        stage.store.put_version(replace(stage.store.versions[version(2).id], state=VersionState.LOST))
        with pytest.raises(ProblemError, match="whose files are lost; a resync would take it back to run~v000001"):
            stage.fleet.resync(A)
        assert stage.store.engines[A].serving == version(2).id


async def test_a_resync_of_an_engine_that_is_away_forgets_nothing_and_is_carried_out_when_it_is_back(
    tmp_path: Path,
) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        engine.down = True
        await stage.until(lambda: stage.store.engines[A].state is EngineState.UNREACHABLE)
        stage.fleet.resync(A)
        probes = engine.probes
        await stage.until(lambda: engine.probes > probes + 1)
        left = stage.store.engines[A]
        assert (left.state, left.serving, left.known) == (EngineState.UNREACHABLE, version(1).id, True)
        assert left.serves("it") == "served it when it was last reached"
        assert engine.loads == ["/root/run/v000001"]
        engine.down = False
        await stage.until(lambda: len(engine.loads) == 2 and stage.store.engines[A].state is EngineState.IN_SYNC)
        assert not stage.store.engines[A].debts.reload


async def test_a_resync_is_remembered_by_the_next_service(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        engine.down = True
        await stage.until(lambda: stage.store.engines[A].state is EngineState.UNREACHABLE)
        stage.fleet.resync(A)
        await stage.store.durable()
    engine.down = False
    async with running(tmp_path, {"a": engine}) as stage:
        await stage.until(lambda: len(engine.loads) == 2 and stage.store.engines[A].state is EngineState.IN_SYNC)


async def test_until_a_resync_has_loaded_it_an_engine_is_not_believed_and_keeps_its_step(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        engine.gate = asyncio.Event()
        stage.fleet.resync(A)
        await stage.until(lambda: len(engine.loads) == 2)
        assert stage.store.engines[A].serving == version(1).id
        assert not is_proven(version(1).id, stage.store.engines.values(), 1)
        engine.gate.set()
        await stage.until(lambda: is_proven(version(1).id, stage.store.engines.values(), 1))


async def test_an_engine_that_serves_what_a_rollback_leads_to_is_asked_at_once(tmp_path: Path) -> None:
    """Updates were paused: it was counted as behind, and might have been restarted since."""
    async with running(tmp_path, {"a": SimulatedEngine()}, probe_interval=600) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        stage.store.pause_updates(stage.store.updates["run"], paused=True)
        stage.store.put_version(version(2))
        stage.store.put_engine(replace(stage.store.engines[A], state=EngineState.BEHIND))
        stage.store.put_version(version(2, barred=True))
        await stage.until(lambda: stage.store.engines[A].state is EngineState.IN_SYNC)
        assert stage.engines["a"].loads == ["/root/run/v000001"]


async def test_what_somebody_may_want_to_be_woken_for_is_a_warning(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with running(tmp_path, {"a": SimulatedEngine()}) as stage:
            stage.store.put_version(version(1), "sealed")
            stage.store.put_version(version(2, state=VersionState.REJECTED), "rejected")
            stage.store.put_engine(replace(stage.store.engines[A], state=EngineState.TAINTED), "tainted")
    levels = {line["event"]: line["log_level"] for line in logs}
    assert (levels["sealed"], levels["rejected"], levels["tainted"]) == ("info", "warning", "warning")


async def test_a_journal_that_cannot_be_written_is_not_held_against_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)

        async def full() -> None:
            raise JournalError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(stage.store, "durable", full)
            stage.store.put_version(version(2))
            await stage.until(lambda: stage.store.loading == {} and stage.store.engines[A].state is EngineState.BEHIND)
            assert stage.store.engines[A].trouble.unreachable_since is None
            assert engine.loads == ["/root/run/v000001"]
        await stage.until(lambda: stage.store.engines[A].serving == version(2).id)


async def test_a_service_that_is_stopped_while_an_engine_looks_at_an_offer_has_told_it_nothing(tmp_path: Path) -> None:
    engine = SimulatedEngine()
    engine.takes_offers = True
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        engine.hangs = True
        offered = version(2, state=VersionState.ANNOUNCED, handed=True)
        stage.store.put_version(offered)
        stage.targets.offer(offered, "run/.offer")
        await stage.until(lambda: engine.ahead == [offered.id])
    assert (stage.store.loading, stage.store.engines[A].state) == ({}, EngineState.IN_SYNC)
    assert engine.loads == ["/root/run/v000001"]
