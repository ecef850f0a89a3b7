"""What becomes of a rollout whose version loses its files when some engines hold it and others do not."""

from dataclasses import replace

import pytest

from refitd.policy.goals import goals_of_engine, goals_of_run
from refitd.policy.next_action import Goals
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord, RolloutRecord
from refitd_client.contract.states import EngineState, Kind, RolloutState, VersionState
from support.records import engine, version

SERVED = version(1, served_at="2026-01-01T00:00:00Z")
SEALED = version(2)
LOST = version(3, state=VersionState.LOST)
AHEAD = engine("a", serving=LOST.id, known=True)
BEHIND = [engine(name, serving=SERVED.id, known=True, state=EngineState.BEHIND) for name in ("b", "c")]
ROLLOUT = RolloutRecord(number=1, run="run", version=LOST.id, cause="", started_at="t", state=RolloutState.ROLLING)


def goals(name: StrategyName, *engines: EngineRecord) -> dict[str, Goals]:
    strategy = Strategy(name=name)
    run = goals_of_run(strategy, ROLLOUT, [LOST, SEALED, SERVED], engines)
    return {each.id: goals_of_engine(run, each, strategy, ROLLOUT, engines) for each in engines}


@pytest.mark.parametrize("name", StrategyName)
def test_a_version_that_is_lost_in_mid_rollout_takes_no_engine_backwards(name: StrategyName) -> None:
    each = goals(name, AHEAD, *BEHIND)
    assert [g.target for g in each.values()] == [LOST] * 3


def test_a_version_that_is_lost_in_mid_rollout_holds_up_nobody() -> None:
    assert [g.loadable for g in goals(StrategyName.ALL, AHEAD, *BEHIND).values()] == [SEALED] * 3
    turns = goals(StrategyName.ROLLING, AHEAD, *BEHIND)
    assert (turns["b"].loadable, turns["c"].loadable) == (SEALED, SERVED)
    there = [engine("b", serving=SEALED.id, known=True, state=EngineState.BEHIND), BEHIND[1]]
    assert goals(StrategyName.ROLLING, AHEAD, *there)["c"].loadable == SEALED


def test_what_no_canary_served_is_not_what_is_loaded_for_a_version_that_is_lost() -> None:
    each = goals(StrategyName.CANARY, AHEAD, *BEHIND)
    assert (each["b"].loadable, each["c"].loadable) == (SERVED, SERVED)


@pytest.mark.parametrize("name", StrategyName)
def test_a_version_that_was_lost_before_any_engine_held_it_is_no_target(name: StrategyName) -> None:
    assert [g.target for g in goals(name, *BEHIND).values()] == [SEALED] * 2


@pytest.mark.parametrize("name", [StrategyName.ROLLING, StrategyName.CANARY])
def test_while_a_delta_that_is_finished_first_waits_for_a_copy_no_engine_goes_past_it(name: StrategyName) -> None:
    """It would never come back to it, and the rollout never come to its end."""
    delta, newer = version(2, kind=Kind.DELTA, base=SERVED.id), version(3)
    rollout = replace(ROLLOUT, version=delta.id)
    run = goals_of_run(Strategy(name=name), rollout, [newer, delta, SERVED], BEHIND)
    assert (run.target, run.wanted, run.loadable) == (delta, delta, SERVED)
    assert goals_of_run(Strategy(), rollout, [newer, delta, SERVED], BEHIND).loadable == newer
