"""What becomes of an update whose version loses its files when some engines hold it and others do not."""

from dataclasses import replace

import pytest

from refitd.policy.goals import LoadableDeltas, goals_of_engine, goals_of_run
from refitd.policy.next_action import Goals
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord, UpdateRecord
from refitd_client.contract.states import EngineState, Kind, UpdateState, VersionState
from support.records import engine, version

SERVED = version(1, served_at="2026-01-01T00:00:00Z")
SEALED = version(2)
LOST = version(3, state=VersionState.LOST)
AHEAD = engine("a", serving=LOST.id, known=True)
BEHIND = [engine(name, serving=SERVED.id, known=True, state=EngineState.BEHIND) for name in ("b", "c")]
KNOWN = {each.id: each for each in (LOST, SEALED, SERVED)}
UPDATE = UpdateRecord(number=1, run="run", version=LOST.id, cause="", started_at="t", state=UpdateState.ROLLING)


def goals(name: StrategyName, *engines: EngineRecord) -> dict[str, Goals]:
    strategy = Strategy(name=name)
    run = goals_of_run(strategy, UPDATE, [LOST, SEALED, SERVED], engines)
    return {each.id: goals_of_engine(run, each, strategy, UPDATE, engines, KNOWN) for each in engines}


@pytest.mark.parametrize("name", StrategyName)
def test_a_version_that_is_lost_in_mid_update_takes_no_engine_backwards(name: StrategyName) -> None:
    each = goals(name, AHEAD, *BEHIND)
    assert [g.target for g in each.values()] == [LOST] * 3


def test_a_version_that_is_lost_in_mid_update_holds_up_nobody() -> None:
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
    """It would never come back to it, and the update never come to its end."""
    delta, newer = version(2, kind=Kind.DELTA, base=SERVED.id), version(3)
    update = replace(UPDATE, version=delta.id)
    run = goals_of_run(Strategy(name=name), update, [newer, delta, SERVED], BEHIND)
    assert (run.target, run.wanted, run.loadable) == (delta, delta, SERVED)
    assert goals_of_run(Strategy(), update, [newer, delta, SERVED], BEHIND).loadable == newer


@pytest.mark.parametrize("name", [StrategyName.ROLLING, StrategyName.CANARY])
def test_an_update_that_an_engine_is_past_is_not_waited_for(name: StrategyName) -> None:
    """A journal that was lost is rebuilt: an engine serves what is validated after the update to an older version. Or
    its files were lost while it was loaded, and an older version was begun meanwhile.
    """
    newest, older = version(3), version(2)
    update = replace(UPDATE, version=older.id)
    engines = [engine("a", serving=newest.id, known=True, state=EngineState.BEHIND), *BEHIND]
    assert goals_of_run(Strategy(name=name), update, [newest, older, SERVED], engines).target == newest
    lost = replace(newest, state=VersionState.LOST)
    assert goals_of_run(Strategy(name=name), update, [lost, older, SERVED], engines).target == lost
    barred = newest.having(barred=True)
    assert goals_of_run(Strategy(name=name), update, [barred, older, SERVED], engines).target == older
    assert goals_of_run(Strategy(name=name), update, [newest, older, SERVED], BEHIND).target == older


def test_in_turn_an_engine_that_waits_for_a_copy_holds_up_none_that_needs_no_copy() -> None:
    """Else neither goes on: the copy that is to come free is read until the other one has gone."""
    delta, newer = (version(step, kind=Kind.DELTA, base=f"run~v00000{step - 1}") for step in (2, 3))
    waits = engine("a", serving=delta.id, known=True, state=EngineState.BEHIND)
    plugged = engine("b", serving=delta.id, known=True, state=EngineState.BEHIND, plugin="1")
    strategy, engines = Strategy(name=StrategyName.ROLLING), [waits, plugged]
    update, known = replace(UPDATE, version=newer.id), [newer, delta, SERVED]
    run = goals_of_run(strategy, update, known, engines, LoadableDeltas(carried={delta.id: "copy"}))
    assert (run.target, run.loadable) == (newer, delta)
    versions = {each.id: each for each in known}
    assert goals_of_engine(run, plugged, strategy, update, engines, versions).loadable == newer
