"""What becomes of an update while the operator of one of its hosts has paused that host: a pause is no verdict."""

from dataclasses import replace

import pytest

from refitd.engine.port import Outcome, Refit
from refitd.policy.contest import held
from refitd.policy.goals import as_ordered, goals_of_engine, goals_of_run
from refitd.policy.next_action import Agenda, Goals, RefitTo, next_action
from refitd.policy.observe import after_refit
from refitd.policy.strategy import Strategy, StrategyName, canary_of, fault_found, finished_first, released, why_waiting
from refitd.state.records import AttemptRecord, EngineRecord, UpdateRecord
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.states import EngineState, UpdateState
from support.records import engine, version

ONE, TWO, THREE = version(1, served_at="t"), version(2), version(3)
WHY = "updates of run are paused on that host since 10:00: refitd resume run there"
ROLLING = Strategy(name=StrategyName.ROLLING)
CANARY = Strategy(name=StrategyName.CANARY)
UPDATE = UpdateRecord(number=1, run="run", cause="", started_at="t", state=UpdateState.ROLLING, version=TWO.id)
REFUSED = Refit(outcome=Outcome.NACK, resumed=True, reason=f"a does not go to {TWO.id} now: {WHY}", waits=True)


def host(name: str = "a", *, waits: bool = True, serving: str | None = ONE.id) -> EngineRecord:
    said = HostEngines(follower=name, waits=WHY if waits else None)
    return engine(name, pulls=True, host=said, state=EngineState.BEHIND, serving=serving)


ATTEMPT = AttemptRecord(id="1", engine="a", version=TWO.id, started_at="t")
HOSTS = [host("a"), host("b", waits=False), host("c", waits=False)]


def test_it_is_ordered_to_nothing_newer_and_when_it_is_resumed_at_once() -> None:
    goals = Goals(target=TWO, loadable=TWO, serving=ONE)
    agenda = Agenda(probe_at=5)
    assert not isinstance(next_action(host(), goals, agenda, 0), RefitTo)
    assert next_action(host(waits=False), goals, agenda, 0) == RefitTo(TWO)
    nothing = Goals(target=TWO, loadable=TWO)
    assert not isinstance(next_action(host(serving=None), nothing, agenda, 0), RefitTo)


def test_it_is_ordered_back_all_the_same_and_loaded_again_where_an_operator_wants_that() -> None:
    barred = Goals(target=ONE, loadable=ONE, serving=version(2, barred=True))
    assert next_action(host(serving=TWO.id), barred, Agenda(probe_at=5), 0) == RefitTo(ONE)
    again = engine("a", pulls=True, host=HostEngines(follower="a", waits=WHY), serving=ONE.id, reload=True)
    goals = Goals(target=ONE, loadable=ONE)
    assert next_action(again.to_load, goals, Agenda(probe_at=5), 0) == RefitTo(ONE)


def test_an_order_that_its_pause_has_ended_counts_as_no_failure_of_the_host_nor_of_the_version() -> None:
    after = host()
    for _ in range(5):
        after = after_refit(after, TWO.id, REFUSED, 0.0)
    assert (after.state, after.trouble.failures, after.reason) == (EngineState.BEHIND, 0, None)
    assert fault_found(CANARY, TWO, UPDATE, [after]) is None


def test_a_host_with_unknown_contents_stays_so_whatever_it_waits_for_and_that_bars_no_version() -> None:
    after = engine("a", pulls=True, known=False, state=EngineState.TAINTED, host=HostEngines(follower="a", waits=WHY))
    for _ in range(4):
        after = after_refit(after, TWO.id, REFUSED, 0.0).having(last_attempt=ATTEMPT)
    assert (after.state, after.trouble.failures) == (EngineState.TAINTED, 4)
    assert fault_found(CANARY, TWO, UPDATE, [after]) is None


def test_another_load_that_an_operator_asked_for_is_not_asked_of_it_again_and_again() -> None:
    again = host().having(reload=True)
    after = after_refit(again, TWO.id, REFUSED, 0.0)
    assert not after.debts.reload
    assert not isinstance(
        next_action(after, Goals(target=TWO, loadable=TWO, serving=ONE), Agenda(probe_at=5), 0), RefitTo
    )


def test_another_host_is_the_canary_unless_it_was_named_or_serves_the_version_already() -> None:
    canary = canary_of(CANARY, TWO, HOSTS)
    assert canary is not None
    assert canary.id == "b"
    assert released(CANARY, TWO, None, HOSTS) == {"b"}
    named = Strategy(name=StrategyName.CANARY, canary="a")
    assert released(named, TWO, None, HOSTS) == {"a"}
    assert why_waiting(named, TWO, HOSTS) == f"the canary a goes first, and waits: {WHY}"
    there = [host("a", serving=TWO.id), *HOSTS[1:]]
    assert canary_of(CANARY, TWO, there) == there[0]
    assert canary_of(CANARY, TWO, [host("a")]) is None


def test_rolling_the_others_go_before_it() -> None:
    assert released(ROLLING, TWO, None, HOSTS) == {"b"}
    there = [host("a"), host("b", waits=False, serving=TWO.id), host("c", waits=False, serving=TWO.id)]
    assert "a" in released(ROLLING, TWO, None, there), "it may have to go back"


@pytest.mark.parametrize("strategy", [ROLLING, CANARY])
def test_a_newer_version_does_not_wait_until_it_is_resumed(strategy: Strategy) -> None:
    assert finished_first(strategy, UPDATE, HOSTS) is None
    assert finished_first(strategy, UPDATE, HOSTS[1:]) == TWO.id
    assert finished_first(strategy, UPDATE, [host("a", serving=TWO.id), *HOSTS[1:]]) == TWO.id


@pytest.mark.parametrize("strategy", [ROLLING, CANARY])
def test_a_newer_version_does_not_wait_for_an_update_that_a_host_does_not_obey(strategy: Strategy) -> None:
    """Its hub has lost what it knew: the host takes nothing but a newer one."""
    contested = engine("a", pulls=True, state=EngineState.CONTESTED, serving=None)
    assert finished_first(strategy, UPDATE, [contested, *HOSTS[1:]]) is None
    fought_over = engine("a", state=EngineState.CONTESTED, serving=None)
    assert finished_first(strategy, UPDATE, [fought_over, *HOSTS[1:]]) == TWO.id


def test_a_host_that_does_not_obey_is_told_again_in_its_own_words_and_of_another_version_at_once() -> None:
    refused = Refit(outcome=Outcome.NACK, resumed=True, reason="the host says why", led=True)
    told = host("a", waits=False).having(last_attempt=ATTEMPT)
    for _ in range(9):
        told = after_refit(told, TWO.id, refused, 1.0)
    at_once, later = (held(replace(told, state=EngineState.BEHIND), TWO.id, now, 2.0) for now in (2.0, 100.0))
    assert (at_once.state, at_once.reason) == (EngineState.CONTESTED, "the host says why")
    assert later.state is EngineState.BEHIND, "it is told again"
    assert held(replace(told, state=EngineState.BEHIND), THREE.id, 2.0, 2.0).state is EngineState.BEHIND


def test_a_pause_keeps_no_engine_on_what_was_rolled_back_from_nor_takes_it_further_back() -> None:
    """What an operator goes back to need not have been served before."""
    paused = replace(UPDATE, paused_since="t")
    goals = Goals(target=TWO, loadable=TWO, last_good=ONE)
    assert goals_of_engine(goals, engine("a", serving=THREE.id), Strategy(), paused, [], {}).loadable == TWO
    for serving in (ONE.id, None):
        assert goals_of_engine(goals, engine("a", serving=serving), Strategy(), paused, [], {}).loadable == ONE


def test_a_host_with_something_newer_that_its_hub_lost_is_not_ordered_back_while_it_waits_for_its_turn() -> None:
    """The hub was restored from a backup and has published step 3 since. The host serves step 2, which the hub lost. It
    was ordered to step 1 meanwhile, refused, obeyed the order to step 3, and then the order to step 1.
    """
    has_two = engine("a", pulls=True, host=HostEngines(follower="a", unknown=TWO.id), state=EngineState.BEHIND)
    waits = Goals(target=THREE, loadable=ONE, last_good=ONE)
    assert not isinstance(next_action(has_two, waits, Agenda(probe_at=5), 0), RefitTo)
    in_turn = Goals(target=THREE, loadable=THREE, last_good=ONE)
    assert next_action(has_two, in_turn, Agenda(probe_at=5), 0) == RefitTo(THREE)


def test_what_one_engine_of_a_host_serves_is_where_the_others_go_when_what_was_ordered_is_barred() -> None:
    """All engines have served step 1, and one has served step 2. Both went to step 1 when step 3 was barred."""
    known = [version(3, barred=True), TWO, ONE]
    engines = [engine("a", serving=TWO.id), engine("b", serving=ONE.id)]
    goals = goals_of_run(ROLLING, None, as_ordered(known, THREE.id, engines), engines)
    assert goals.target == TWO
    assert goals_of_run(ROLLING, None, as_ordered(known, THREE.id, engines[1:]), engines[1:]).target == ONE
