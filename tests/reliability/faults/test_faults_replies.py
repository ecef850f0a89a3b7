"""A proxy between refitd and an engine that cuts, delays, repeats and exchanges: what counts as served is served."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.stand import Stand, Subject, standing, until
from refitd_client.contract.states import EngineState
from support.jobs import served_by
from support.proxy import Fault, Hold, Proxy

LOAD = "/update_weights_from_disk"
PAUSE = "/pause_generation"
RESUME = "/continue_generation"
CHECK = "/weights_checker"
INFO = "/model_info"
CALLS = (LOAD, CHECK, RESUME, PAUSE, INFO)


def served_after(stand: Stand, engine: Subject, step: int) -> None:
    """Publish a step, and hold what the service says then against what the engine answers."""
    stand.publish(engine.model(step), step)
    stand.is_served(step)
    assert engine.serves(step), f"step {step} counts as served, and the engine answers with something else"
    assert served_by(engine.server).label == str(step)


def never_resumed_unproved(proxy: Proxy, since: int) -> None:
    """Between a load whose end nobody heard and the next load that was checked, nobody let the engine go on."""
    calls = [path for path in proxy.seen[since:] if path in {LOAD, RESUME, CHECK}]
    for index, path in enumerate(calls):
        if path == RESUME and LOAD in calls[:index]:
            assert calls[index - 1] in {CHECK, RESUME}, f"resumed without a look at its contents: {calls}"


@pytest.mark.parametrize(
    "happenings",
    [
        [(call, fault) for fault in (Fault.CUT_REQUEST, Fault.HALF_REQUEST) for call in (PAUSE, LOAD, RESUME)],
        [(call, fault) for fault in (Fault.HALF_REPLY, Fault.GARBAGE) for call in (LOAD, CHECK, RESUME)],
        [(call, Fault.LOST_REPLY) for call in CALLS],
    ],
    ids=["before_it_was_sent", "half_a_reply_or_garbage", "reply_cut"],
)
def test_a_call_to_an_engine_that_is_cut_ends_in_sync_with_proof(
    happenings: list[tuple[str, Fault]], engine: Subject, tmp_path: Path
) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        served_after(stand, engine, 1)
        for step, (call, fault) in enumerate(happenings, start=2):
            since = len(proxy.seen)
            proxy.plan(call, fault)
            served_after(stand, engine, step)
            proxy.until_done(call)
            never_resumed_unproved(proxy, since)
        assert stand.engine_now.state is EngineState.IN_SYNC


def test_the_reply_lost_after_success_taints_and_a_repair_proves_what_is_there(engine: Subject, tmp_path: Path) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        served_after(stand, engine, 1)
        proxy.plan(LOAD, Fault.LOST_REPLY)
        served_after(stand, engine, 2)
        assert "TAINTED" in stand.states()
        assert proxy.count(LOAD) >= 3, "what was loaded with nobody to hear of it was not loaded once more"


def test_replies_that_come_twice_are_never_taken_for_those_of_the_next_call(engine: Subject, tmp_path: Path) -> None:
    """Left in a connection, the second would be an answer to a question that was not asked yet."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        for call in (*CALLS, "/server_info"):
            proxy.plan(call, *[Fault.TWICE] * 1000)
        for step in (1, 2, 3):
            served_after(stand, engine, step)
        assert not {"TAINTED", "UNREACHABLE"} & set(stand.states()), stand.states()


def test_engine_slower_than_the_time_out_that_succeeds_later_is_not_believed(engine: Subject, tmp_path: Path) -> None:
    """The load was carried out, and its answer comes long after the service has given it up."""
    late = Hold(reply=True)
    with (
        Proxy(engine.server.port) as proxy,
        standing(tmp_path, engine, "--load-timeout", "0.5", engines=[proxy.url]) as stand,
    ):
        served_after(stand, engine, 1)
        proxy.plan(LOAD, late)
        publication = stand.publish(engine.model(2), 2)
        late.until_arrived()
        stand.until_engine(EngineState.TAINTED)
        publication.wait(timeout=60)
        assert engine.serves(2)
        late.until_passed()
        served_after(stand, engine, 3)


def test_a_load_that_arrives_long_after_it_was_given_up_is_found_and_undone(engine: Subject, tmp_path: Path) -> None:
    """The network delivers a request when the engine serves something newer already."""
    late = Hold()
    with (
        Proxy(engine.server.port) as proxy,
        standing(tmp_path, engine, "--load-timeout", "0.5", engines=[proxy.url]) as stand,
    ):
        served_after(stand, engine, 1)
        proxy.plan(LOAD, late)
        stand.publish(engine.model(2), 2)
        late.until_arrived()
        stand.until_engine(EngineState.TAINTED)
        served_after(stand, engine, 3)
        loads = proxy.count(LOAD)
        late.until_passed()
        proxy.until(LOAD, loads + 1)
        until(lambda: served_by(engine.server).label == "3" and engine.serves(3))
        until(lambda: stand.engine_now.state is EngineState.IN_SYNC)


def test_replies_that_are_exchanged_between_connections_prove_nothing(engine: Subject, tmp_path: Path) -> None:
    """The two questions of a check are asked at the same time; each gets the other's answer."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        served_after(stand, engine, 1)
        proxy.until(INFO, proxy.count(INFO) + 2)
        loading = Hold()
        proxy.plan(LOAD, loading)
        publication = stand.publish(engine.model(2), 2)
        loading.until_arrived()
        proxy.plan(INFO, Fault.SWAPPED)
        proxy.plan(CHECK, Fault.SWAPPED)
        loading.release()
        publication.wait(timeout=60)
        assert engine.serves(2)
        assert "TAINTED" in stand.states()


def test_an_engine_that_is_down_at_the_start_holds_up_nothing_and_is_brought_up_unasked(
    engine: Subject, tmp_path: Path
) -> None:
    with ExitStack() as closing:
        proxy = closing.enter_context(Proxy(engine.server.port))
        proxy.down()
        stand = closing.enter_context(standing(tmp_path, engine, engines=[proxy.url]))
        publication = stand.publish(engine.model(1), 1)
        publication.wait(timeout=60, wait_for="sealed")
        stand.until_engine(EngineState.UNREACHABLE)
        assert stand.get("/readyz").status_code == 200
        proxy.up()
        publication.wait(timeout=60)
        assert engine.serves(1)


def test_an_engine_that_is_cut_off_in_mid_load_is_repaired_when_it_is_back(engine: Subject, tmp_path: Path) -> None:
    cut = Hold(reply=True)
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        served_after(stand, engine, 1)
        proxy.plan(LOAD, cut)
        publication = stand.publish(engine.model(2), 2)
        cut.until_arrived()
        since = len(proxy.seen)
        proxy.down()
        stand.until_engine(EngineState.TAINTED)
        proxy.up()
        publication.wait(timeout=60)
        never_resumed_unproved(proxy, since)
        assert engine.serves(2)
