"""What an engine is loaded with that is to be loaded again: by an operator's resync, or since its version has other
contents now. It goes to nothing older than it serves.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refitd.policy.goals import LoadableDeltas, goals_of_engine, goals_of_run
from refitd.policy.next_action import Agenda, RefitTo, Rest, next_action
from refitd.policy.strategy import Strategy, StrategyName
from refitd.problem import ProblemError
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind, UpdateState, VersionState
from support.fleets import running
from support.records import engine, version
from support.simulated_engine import SimulatedEngine

GOOD, NEW = version(1, served_at="t"), version(2)
DELTA = version(3, kind=Kind.DELTA, base=NEW.id)
UPDATE = UpdateRecord(number=1, run="run", version=NEW.id, cause="", started_at="t", state=UpdateState.ROLLING)
IN_TURN = Strategy(name=StrategyName.ROLLING)
WAITING = LoadableDeltas()
REFUSED = LoadableDeltas(refused={DELTA.id: "there is no room for a copy"})
BROKEN = engine("0", serving=None, known=False, state=EngineState.TAINTED)


def again(serving: VersionRecord, name: str = "a", **fields: Any) -> EngineRecord:
    return engine(name, serving=serving.id, known=True, reload=True, state=EngineState.BEHIND, **fields)


def goes_to(
    one: EngineRecord,
    *others: EngineRecord,
    versions: tuple[VersionRecord, ...] = (NEW, GOOD),
    strategy: Strategy = IN_TURN,
    update: UpdateRecord = UPDATE,
    carriage: LoadableDeltas = WAITING,
) -> str | None:
    """The id of the version that an engine is loaded with next, None where it stays as it is."""
    engines, known = [one, *others], {each.id: each for each in versions}
    run = goals_of_run(strategy, update, versions, engines, carriage)
    own = goals_of_engine(run, one, strategy, update, engines, known)
    action = next_action(one.to_load, own, Agenda(probe_at=9.0), 0.0)
    assert isinstance(action, Rest | RefitTo)
    return action.version.id if isinstance(action, RefitTo) else None


def test_in_mid_update_it_is_loaded_with_what_it_serves_also_while_it_is_not_its_turn() -> None:
    assert goes_to(again(NEW), BROKEN) == NEW.id
    assert goes_to(again(NEW, "b"), again(NEW, "a")) == NEW.id
    assert goes_to(again(NEW), update=replace(UPDATE, paused_since="t"), strategy=Strategy()) == NEW.id
    canary = Strategy(name=StrategyName.CANARY, canary="b")
    assert goes_to(again(NEW), engine("b", serving=GOOD.id, known=True), strategy=canary) == NEW.id
    assert goes_to(again(GOOD), BROKEN) == GOOD.id


@pytest.mark.parametrize("name", StrategyName)
def test_with_a_delta_that_no_copy_can_hold_it_serves_on_until_there_is_something_newer(name: StrategyName) -> None:
    others = [engine("b", serving=NEW.id, known=True)]
    for plugin in (None, "1"):
        one = again(DELTA, plugin=plugin)
        assert (
            goes_to(one, *others, versions=(DELTA, NEW, GOOD), strategy=Strategy(name=name), carriage=REFUSED) is None
        )
    newer = version(4, served_at="t")
    assert (
        goes_to(again(DELTA), *others, versions=(newer, DELTA, NEW), strategy=Strategy(name=name), carriage=REFUSED)
        == newer.id
    )


def test_with_a_delta_that_waits_for_a_copy_it_waits_as_well() -> None:
    assert goes_to(again(DELTA), versions=(DELTA, NEW)) is None
    assert goes_to(again(DELTA), versions=(DELTA, NEW), carriage=LoadableDeltas(carried={DELTA.id: "c"})) == DELTA.id


def test_with_the_plugin_it_goes_by_the_chain_when_it_is_its_turn_and_is_loaded_from_a_copy_before() -> None:
    versions, carried = (DELTA, NEW), LoadableDeltas(carried={DELTA.id: "copy"})
    assert goes_to(again(DELTA, plugin="1"), versions=versions) == NEW.id
    assert goes_to(again(DELTA, plugin="1"), BROKEN, versions=(DELTA, NEW, GOOD)) is None
    assert goes_to(again(DELTA, plugin="1"), BROKEN, versions=(DELTA, NEW, GOOD), carriage=carried) == DELTA.id


def test_a_rollback_and_an_order_of_an_upstream_take_it_back() -> None:
    assert goes_to(again(NEW), versions=(NEW.having(barred=True), GOOD)) == GOOD.id
    assert goes_to(again(NEW), versions=(replace(NEW, state=VersionState.REJECTED), GOOD)) == GOOD.id
    ordered = replace(UPDATE, version=GOOD.id)
    strategy = Strategy()
    run = replace(goals_of_run(strategy, ordered, [GOOD], [again(NEW)]), ordered=True)
    own = goals_of_engine(run, again(NEW), strategy, ordered, [again(NEW)], {NEW.id: NEW, GOOD.id: GOOD})
    assert own.loadable == GOOD


def test_where_the_files_of_what_it_serves_are_lost_it_serves_on() -> None:
    assert goes_to(again(NEW), versions=(replace(NEW, state=VersionState.LOST), GOOD)) is None


def test_in_turn_it_holds_up_no_other_engine_while_it_has_nothing_to_be_loaded_with() -> None:
    """The target that it alone serves cannot be loaded, so it takes no place among those that go on to what can be."""
    behind = engine("b", serving=GOOD.id, known=True, state=EngineState.BEHIND)
    assert goes_to(behind, again(DELTA, "a"), versions=(DELTA, NEW, GOOD), carriage=REFUSED) == NEW.id


async def test_a_resync_of_what_cannot_be_loaded_again_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path, {"a": SimulatedEngine()}) as stage:
        for step in (1, 2):
            stage.store.put_version(version(step))
            await stage.until(lambda step=step: stage.store.versions[version(step).id].served_at is not None)
        served = stage.store.versions[version(2).id]
        stage.store.put_version(served.having(kind=Kind.DELTA, base=version(1).id))
        stage.targets.refuse(stage.store.versions[served.id], "there is no room for a copy")
        with pytest.raises(
            ProblemError, match=r"\(there is no room for a copy\); a resync would take it back to run~v0"
        ):
            stage.fleet.resync("a:1")
        stage.store.put_version(replace(served, state=VersionState.REJECTED).having(handed=True))
        with pytest.raises(ProblemError, match="which has no good files; a resync would take it back to run~v000001"):
            stage.fleet.resync("a:1")
        assert stage.store.engines["a:1"].serving == served.id
