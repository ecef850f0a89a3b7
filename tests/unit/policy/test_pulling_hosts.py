"""Engines that are other refitds: what the rollout asks of them, and what counts as a change there."""

from dataclasses import replace

from refitd.engine.port import Process, Reached
from refitd.policy.chain import needs_copy, step_in_place, takes_in_place
from refitd.policy.goals import goals_of_engine
from refitd.policy.leases import EngineView, LeaseKind, Views, leases
from refitd.policy.next_action import Agenda, Goals, RefitTo, Rest, next_action
from refitd.policy.observe import Expected, after_probe
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import AttemptRecord
from refitd_client.contract.states import EngineState, Kind
from support.records import engine, version

BASE, MIDDLE = version(1), version(2, kind=Kind.DELTA, base="run~v000001")
NEWEST = version(3, kind=Kind.DELTA, base="run~v000002")
ALL = {each.id: each for each in (BASE, MIDDLE, NEWEST)}


def test_a_host_is_given_a_delta_at_once_without_a_copy_or_the_steps_before_it() -> None:
    for serving, known in ((None, True), (BASE.id, True), (None, False)):
        host = engine(pulls=True, configuration="c", serving=serving, known=known)
        assert step_in_place(host, NEWEST, ALL) == NEWEST
        assert takes_in_place(host, NEWEST, ALL)
        assert not needs_copy(host, NEWEST, ALL)
    assert step_in_place(engine(pulls=True, serving=NEWEST.id), NEWEST, ALL) is None


def test_engines_of_a_host_that_were_restarted_are_no_other_writer() -> None:
    seen = Reached(
        model_path="(nothing)",
        weight_version=None,
        server_version="1",
        configuration="c",
        startup_path=None,
        process=Process(started="same"),
        pulls=True,
    )
    host = engine(pulls=True, serving=BASE.id, process=Process(started="same"), model_path="/root/run/v000001")
    expected = Expected(path="/root/run/v000001", label="1")
    for _ in range(5):
        after = after_probe(host, seen, expected, BASE.id, 0.0)
        assert (after.state, after.serving, after.contest) == (EngineState.BEHIND, None, None)
    assert "not all of the host's engines" in (after.reason or "")


def test_a_host_that_carried_out_an_order_of_which_nothing_was_heard_serves_it_and_is_not_ordered_back() -> None:
    """With a strategy by which hosts go in turn it may not be its turn any more when it is heard again."""
    order = AttemptRecord(id="1", engine="host", version=NEWEST.id, started_at="", outcome="UNREACHABLE")
    seen = Reached(
        model_path="/root/run/v000003",
        weight_version="3",
        server_version="1",
        configuration="c",
        startup_path=None,
        pulls=True,
        serves=NEWEST.id,
    )
    host = engine(state=EngineState.UNREACHABLE, pulls=True, serving=BASE.id, model_path="/root/run/v000001")
    for before in (replace(host, last_attempt=order), replace(host, last_attempt=order, serving=None)):
        after = after_probe(before, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0)
        assert (after.state, after.serving, after.reason) == (EngineState.IN_SYNC, NEWEST.id, None)
    refused = replace(host, last_attempt=replace(order, outcome="NACK"))
    after = after_probe(refused, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0)
    assert (after.state, after.serving) == (EngineState.BEHIND, None)


def test_engines_of_a_host_go_back_where_that_is_ordered_and_nowhere_else() -> None:
    goals = Goals(target=BASE, wanted=BASE, loadable=BASE, serving=version(2))
    ahead = engine(state=EngineState.BEHIND, serving=version(2).id)
    rests = Agenda(probe_at=9.0)
    assert isinstance(next_action(ahead, goals, rests, 0.0), Rest)
    assert next_action(ahead, replace(goals, ordered=True), rests, 0.0) == RefitTo(BASE)


def test_an_engine_that_is_ordered_back_to_a_delta_goes_by_what_that_stands_on_when_it_is_its_turn() -> None:
    """No copy holds the delta where all engines have the plugin, and from what came after it no step leads there."""
    goals = Goals(target=MIDDLE, wanted=MIDDLE, loadable=BASE, last_good=BASE, serving=version(3), ordered=True)
    ahead, rests = engine(state=EngineState.BEHIND, serving=version(3).id), Agenda(probe_at=9.0)
    broken = engine("0", state=EngineState.TAINTED, known=False)
    for name, others, goes in (("all", [], True), ("rolling", [], True), ("rolling", [broken], False)):
        strategy = Strategy(name=StrategyName(name))
        own = goals_of_engine(goals, ahead, strategy, None, [ahead, *others])
        assert (next_action(ahead, own, rests, 0.0) == RefitTo(BASE)) is goes
    served = replace(goals, target=replace(MIDDLE, served_at="1"))
    own = goals_of_engine(served, ahead, Strategy(name=StrategyName.CANARY), None, [ahead])
    assert next_action(ahead, own, rests, 0.0) == RefitTo(BASE)


def test_what_a_host_serves_is_leased_at_its_hub() -> None:
    view = EngineView(id="host", run="run", state=EngineState.IN_SYNC, serving=NEWEST.id)
    assert [lease.kind for lease in leases(Views(engines=(view,)))[NEWEST.id]] == [LeaseKind.SERVING]
