"""Engines that are other refitds: what the reconciler asks of them, and what counts as a change there."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.engine.fingerprints import proof_by
from refitd.engine.port import Process, Reached
from refitd.policy.chain import needs_copy, step_in_place, takes_in_place
from refitd.policy.goals import goals_of_engine
from refitd.policy.leases import EngineView, LeaseKind, Views, leases
from refitd.policy.next_action import Agenda, Goals, RefitTo, Rest, next_action
from refitd.policy.observe import Expected, after_probe, after_word, compared
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.states import EngineState, Kind, VersionState
from support.records import engine, version

BASE, MIDDLE = version(1), version(2, kind=Kind.DELTA, base="run~v000001")
NEWEST = version(3, kind=Kind.DELTA, base="run~v000002")
ALL = {each.id: each for each in (BASE, MIDDLE, NEWEST)}


def host_says(**more: Any) -> Reached:
    """What a host answers to a probe."""
    return Reached(
        server_version="1", configuration="c", startup_path=None, **({"host": HostEngines(follower="a")} | more)
    )


def test_a_host_is_given_a_delta_at_once_without_a_copy_or_the_steps_before_it() -> None:
    for serving, known in ((None, True), (BASE.id, True), (None, False)):
        host = engine(pulls=True, configuration="c", serving=serving, known=known)
        assert step_in_place(host, NEWEST, ALL) == NEWEST
        assert takes_in_place(host, NEWEST, ALL)
        assert not needs_copy(host, NEWEST, ALL)
    assert step_in_place(engine(pulls=True, serving=NEWEST.id), NEWEST, ALL) is None


def test_engines_of_a_host_that_were_restarted_are_no_other_writer() -> None:
    seen = host_says(
        model_path="(nothing)",
        weight_version=None,
        process=Process(started="same"),
    )
    host = engine(pulls=True, serving=BASE.id, process=Process(started="same"), model_path="/root/run/v000001")
    expected = Expected(path="/root/run/v000001", label="1")
    for _ in range(5):
        after = after_probe(host, seen, expected, BASE.id, 0.0)
        assert (after.state, after.serving, after.trouble.contest) == (EngineState.BEHIND, None, None)
    assert "not all of the host's engines" in (after.reason or "")


@pytest.mark.parametrize("outcome", ["UNREACHABLE", "NACK"])
def test_a_host_that_carried_out_an_order_after_all_serves_it_and_is_not_ordered_back(outcome: str) -> None:
    """Nothing was heard of it, or it did not obey before a later reply. With a strategy by which hosts go in turn it
    may not be its turn any more then.
    """
    order = AttemptRecord(id="1", engine="host", version=NEWEST.id, started_at="", outcome=outcome)
    seen = host_says(
        model_path="/root/run/v000003",
        weight_version="3",
        serves=NEWEST.id,
    )
    host = engine(state=EngineState.UNREACHABLE, pulls=True, serving=BASE.id, model_path="/root/run/v000001")
    for before in (host.having(last_attempt=order), host.having(last_attempt=order, serving=None)):
        after = after_probe(before, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0)
        assert (after.state, after.serving, after.reason) == (EngineState.IN_SYNC, NEWEST.id, None)
        assert after.trouble.last_attempt is not None
        assert after.trouble.last_attempt.outcome == "ACK", "the journal keeps the attempt as it ended"
    contested = host.having(last_attempt=order, contest="another leads it", contests=3, contested_at=0.0)
    after = after_probe(contested, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0)
    assert (after.state, after.trouble.contest) == (EngineState.IN_SYNC, None)
    tainted = host.having(last_attempt=replace(order, outcome="TAINTED"))
    after = after_probe(tainted, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0)
    assert (after.state, after.serving) == (EngineState.BEHIND, None)


def test_a_host_that_proves_something_newer_than_its_hub_knows_of_it_serves_that_and_is_not_ordered_back() -> None:
    """The hub was restored from a backup that is older than the host's last load, and has the version."""
    seen = host_says(model_path="/root/run/v000003", weight_version="3", serves=NEWEST.id)
    expected = Expected(path="/root/run/v000001", label="1")
    last = AttemptRecord(id="1", engine="host", version=BASE.id, started_at="", outcome="ACK")
    host = engine(pulls=True, serving=BASE.id, model_path="/root/run/v000001", weight_version="1", last_attempt=last)

    def serving(before: EngineRecord = host, told: VersionRecord | None = NEWEST) -> str | None:
        return after_probe(before, seen, expected, MIDDLE.id, 0.0, told=told).serving

    assert serving() == serving(host.having(serving=None, held=BASE.id)) == NEWEST.id
    assert serving(engine(pulls=True)) == NEWEST.id, "the hub knows the host no more"
    assert serving(told=None) is None, "the hub does not know it"
    assert (
        serving(told=NEWEST.having(barred=True)) is serving(told=replace(NEWEST, state=VersionState.VALIDATING)) is None
    )
    failed = host.having(serving=None, last_attempt=replace(last, version=NEWEST.id, outcome="TAINTED"))
    assert serving(failed) is None, "it was brought there, and its contents were in doubt"
    assert serving(host.having(serving=version(4).id)) is None, "it was brought to something newer"


@pytest.mark.parametrize(
    ("desires", "target", "is_ordered"),
    [
        (NEWEST.id, BASE.id, True),
        (NEWEST.id, MIDDLE.id, True),
        (MIDDLE.id, MIDDLE.id, False),
        (BASE.id, MIDDLE.id, False),
        (None, BASE.id, False),
        (NEWEST.id, None, False),
    ],
)
def test_a_host_that_has_obeyed_a_late_order_to_go_where_it_is_not_to_be_is_ordered_again(
    desires: str | None, target: str | None, is_ordered: bool
) -> None:
    """The hub has given up on that order, and has ordered nothing since: the host still serves what it served."""
    seen = host_says(
        model_path="/root/run/v000001",
        weight_version="1",
        serves=BASE.id,
        desires=desires,
    )
    host = engine(pulls=True, serving=BASE.id, model_path="/root/run/v000001", weight_version="1")
    after = after_probe(host, seen, Expected(path="/root/run/v000001", label="1"), target, 0.0)
    assert after.debts.reload is is_ordered
    assert (after.state is EngineState.BEHIND) is (is_ordered or target == MIDDLE.id)


def test_a_host_whose_engines_were_all_restarted_that_it_had_given_up_tries_again_what_it_has_given_up() -> None:
    def strikes_after(before: int, now: int) -> dict[str, int]:
        told = [HostEngines(follower="h", states={EngineState.QUARANTINED: many}, engines=()) for many in (before, now)]
        seen = host_says(
            model_path="/root/run/v000001",
            weight_version="1",
            host=told[1],
            serves=BASE.id,
        )
        host = engine(pulls=True, serving=BASE.id, host=told[0], strikes={NEWEST.id: 3})
        return after_probe(host, seen, Expected(path="/root/run/v000001", label="1"), NEWEST.id, 0.0).trouble.strikes

    mended = HostEngines(follower="h", states={EngineState.IN_SYNC: 2})
    quarantined = replace(mended, states={EngineState.QUARANTINED: 1})
    in_an_order = after_word(engine(pulls=True, host=quarantined, strikes={NEWEST.id: 3}), mended)
    assert (in_an_order.seen.host, in_an_order.trouble.strikes) == (mended, {})
    assert strikes_after(2, 0) == {}
    assert strikes_after(2, 1) == strikes_after(1, 1) == strikes_after(0, 0) == {NEWEST.id: 3}


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
    broken, known = engine("0", state=EngineState.TAINTED, known=False), {version(3).id: version(3)}
    for name, others, goes in (("all", [], True), ("rolling", [], True), ("rolling", [broken], False)):
        strategy = Strategy(name=StrategyName(name))
        own = goals_of_engine(goals, ahead, strategy, None, [ahead, *others], known)
        assert (next_action(ahead, own, rests, 0.0) == RefitTo(BASE)) is goes
    served = replace(goals, target=MIDDLE.having(served_at="1"))
    own = goals_of_engine(served, ahead, Strategy(name=StrategyName.CANARY), None, [ahead], known)
    assert next_action(ahead, own, rests, 0.0) == RefitTo(BASE)


def test_what_a_host_serves_is_leased_at_its_hub() -> None:
    view = EngineView(id="host", run="run", state=EngineState.IN_SYNC, serving=NEWEST.id)
    assert [lease.kind for lease in leases(Views(engines=(view,)))[NEWEST.id]] == [LeaseKind.SERVING]


GOOD, TARGET, BEYOND = version(1), version(2), version(3)
WAITS = Goals(target=TARGET, loadable=GOOD, last_good=GOOD)  # it is not the host's turn


def mends(goals: Goals, host: EngineRecord, known: dict[str, VersionRecord]) -> Goals:
    return goals_of_engine(goals, host, Strategy(), None, [], known)


def mended(goals: Goals = WAITS, there: VersionRecord = TARGET, **fields: Any) -> str | None:
    """Where a host is brought that has proved a version and proves nothing now."""
    known = {each.id: each for each in (GOOD, TARGET, BEYOND)} | {there.id: there}
    after = mends(goals, engine(**({"pulls": True, "held": there.id} | fields)), known)
    return None if after.loadable is None else after.loadable.id


def test_a_host_of_which_an_engine_was_restarted_is_mended_where_it_was_brought_though_it_is_not_its_turn() -> None:
    assert mended() == TARGET.id
    assert mended(replace(WAITS, target=BEYOND)) == TARGET.id, "a newer one has come, and it waits for that"


def test_a_host_that_was_found_to_have_carried_out_an_order_is_mended_there_like_one_that_has_answered() -> None:
    """The answer to the order was lost; then an engine of the host was restarted while it was not the host's turn."""
    order = AttemptRecord(id="1", engine="host", version=TARGET.id, started_at="", outcome="UNREACHABLE")
    seen = host_says(
        model_path="/root/run/v000002",
        weight_version="2",
        serves=TARGET.id,
    )
    expected = {each.id: Expected(path=f"/root/run/v00000{each.label}", label=each.label) for each in (GOOD, TARGET)}
    host = engine(pulls=True, serving=GOOD.id, model_path="/root/run/v000001", weight_version="1", last_attempt=order)
    found = after_probe(host, seen, expected[GOOD.id], TARGET.id, 0.0)
    silent = replace(seen, model_path="(nothing that is proved)", weight_version=None, serves=None)
    restarted = after_probe(found, silent, expected[TARGET.id], TARGET.id, 1.0)
    assert (found.serving, restarted.serving, restarted.known) == (TARGET.id, None, True)
    known = {each.id: each for each in (GOOD, TARGET)}
    assert mends(WAITS, restarted, known).loadable == TARGET
    never_found = after_probe(host, silent, expected[GOOD.id], TARGET.id, 1.0)
    assert mends(WAITS, never_found, known).loadable == GOOD, "whether it was obeyed is not known"


def test_a_host_that_was_not_brought_there_or_is_not_to_be_there_gets_the_last_good_version() -> None:
    assert mended(there=TARGET.having(barred=True)) == GOOD.id
    assert mended(there=replace(TARGET, state=VersionState.LOST)) == GOOD.id
    assert mended(there=BEYOND) == GOOD.id
    assert mended(known=False) == mended(strikes={TARGET.id: 3}) == mended(held=None) == GOOD.id
    assert mended(pulls=False) == GOOD.id, "an engine that was restarted has lost what it had"


def test_a_host_that_serves_something_or_has_nowhere_to_go_is_left_as_it_is() -> None:
    assert mended(serving=GOOD.id) == GOOD.id
    assert mended(Goals(target=TARGET)) is None
    assert mended(replace(WAITS, target=None)) == GOOD.id
    assert mended(replace(WAITS, loadable=BEYOND, target=BEYOND)) == BEYOND.id


def test_a_host_that_was_found_to_serve_a_version_proves_it_as_one_that_has_answered() -> None:
    host = engine(pulls=True, serving=NEWEST.id, configuration="c")
    alone = compared(host, None, "refitd-host:a:b", NEWEST.id)
    assert (alone.serving, alone.contents.proof) == (NEWEST.id, proof_by("refitd-host:a:b", recorded=True))
    assert compared(host, "refitd-host:a:b", "refitd-host:a:b", NEWEST.id).contents.proof == proof_by("refitd-host:a:b")
    assert compared(host, "refitd-host:a:b", "refitd-host:a:c", NEWEST.id).serving is None
    assert compared(host, None, None, NEWEST.id).contents.proof is None
    assert compared(host.having(host=None), None, "found", NEWEST.id).contents.proof is None  # its name alone says so
