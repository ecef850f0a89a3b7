"""Engines that are in sync are looked at seldom where there are many, and all others as often as the operator says."""

from pathlib import Path

import pytest

from refitd.policy.strategy import Strategy, StrategyName
from refitd.update import entry
from refitd_client.contract.states import EngineState
from support.fleets import running
from support.records import version
from support.simulated_engine import SimulatedEngine

A, B = "a:1", "b:1"


@pytest.fixture(autouse=True)
def _at_rest_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = entry.until_look
    monkeypatch.setattr(
        entry, "until_look", lambda *args, rests, **more: 3600.0 if rests else usual(*args, rests=rests, **more)
    )


async def test_one_that_does_not_answer_is_looked_at_while_those_at_rest_are_left_alone(tmp_path: Path) -> None:
    engines = {"a": SimulatedEngine(), "b": SimulatedEngine()}
    engines["b"].down = True
    async with running(tmp_path, engines) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        looked, away = engines["a"].probes, engines["b"].probes
        await stage.until(lambda: engines["b"].probes > away + 5)
        assert engines["a"].probes == looked
        engines["b"].restart()
        await stage.until(lambda: stage.store.engines[B].serving == version(1).id)
        assert engines["a"].probes == looked


async def test_one_that_cannot_load_the_target_is_looked_at_while_those_at_rest_are_left_alone(tmp_path: Path) -> None:
    engines = {"a": SimulatedEngine(), "b": SimulatedEngine()}
    async with running(tmp_path, engines) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: {each.serving for each in stage.store.engines.values()} == {version(1).id})
        stage.lost.add(version(2).id)
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.engines[A].state is EngineState.BEHIND)
        looked = engines["a"].probes
        await stage.until(lambda: engines["a"].probes > looked + 1)


async def test_the_first_look_of_an_engine_that_comes_to_rest_is_drawn_apart_from_the_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thousand engines that come to rest after one update are all looked at within the same seconds."""
    drawn: list[bool] = []

    def noted(interval: float, *_: object, rests: bool, arrives: bool = False) -> float:
        if rests:
            drawn.append(arrives)
        return interval

    monkeypatch.setattr(entry, "until_look", noted)
    engine = SimulatedEngine()
    async with running(tmp_path, {"a": engine}) as stage:
        await stage.until(lambda: engine.probes > 2)
        assert (drawn[0], set(drawn[1:])) == (True, {False})
        drawn.clear()
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        await stage.until(lambda: True in drawn)
        assert drawn.count(True) == 1


async def test_engines_whose_turn_has_not_come_are_behind_as_soon_as_there_is_a_newer_version(tmp_path: Path) -> None:
    """And not from the next look on: who counts those in sync counts none that serves the version before."""
    engines = {name: SimulatedEngine() for name in ("a", "b", "c")}
    rolling = Strategy(name=StrategyName.ROLLING, max_unavailable=1)
    async with running(tmp_path, engines, probe_interval=3600.0, strategy=rolling) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: {each.serving for each in stage.store.engines.values()} == {version(1).id})
        await stage.until(lambda: {each.state for each in stage.store.engines.values()} == {EngineState.IN_SYNC})
        stage.lost.add(version(2).id)  # so that the first one's turn does not end
        stage.store.put_version(version(2))
        await stage.until(lambda: {each.state for each in stage.store.engines.values()} == {EngineState.BEHIND})
        assert {each.serving for each in stage.store.engines.values()} == {version(1).id}
