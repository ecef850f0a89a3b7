"""What to do next with one engine."""

from dataclasses import replace

import pytest

from refitd.policy.next_action import (
    Agenda,
    CancelPrefetch,
    Goals,
    Prefetch,
    Probe,
    RefitTo,
    Rest,
    Resume,
    next_action,
)
from refitd_client.contract.states import EngineState, VersionState
from support.records import engine, version

NOW = 100.0
LATER = Agenda(probe_at=NOW + 5)
TARGET = version(7)
GOALS = Goals(target=TARGET, loadable=TARGET)


def test_an_engine_that_nobody_has_seen_is_probed_first() -> None:
    assert next_action(engine(state=EngineState.PROBING), GOALS, Agenda(), NOW) == Probe()


def test_an_engine_behind_its_target_is_brought_to_it() -> None:
    found = next_action(engine(state=EngineState.BEHIND, serving="old"), GOALS, LATER, NOW)
    assert found == RefitTo(TARGET)


def test_an_engine_on_its_target_rests_until_its_next_probe() -> None:
    found = next_action(engine(serving=TARGET.id), GOALS, LATER, NOW)
    assert found == Rest(NOW + 5)


def test_an_engine_in_sync_is_looked_at_from_time_to_time() -> None:
    assert next_action(engine(serving=TARGET.id), GOALS, Agenda(probe_at=NOW), NOW) == Probe()


def test_a_failed_version_waits_for_its_back_off() -> None:
    agenda = replace(LATER, failed=TARGET.id, retry_at=NOW + 1)
    nacked = engine(state=EngineState.NACKED, serving="old")
    assert next_action(nacked, GOALS, agenda, NOW) == Rest(NOW + 1)
    assert next_action(nacked, GOALS, agenda, NOW + 1) == RefitTo(TARGET)


def test_a_newer_version_does_not_wait_for_the_back_off_of_the_old_one() -> None:
    agenda = replace(LATER, failed=TARGET.id, retry_at=NOW + 60)
    nacked = engine(state=EngineState.NACKED, serving="old")
    assert next_action(nacked, Goals(target=version(8), loadable=version(8)), agenda, NOW) == RefitTo(version(8))


def test_a_tainted_engine_goes_to_a_target_with_a_record() -> None:
    goals = Goals(target=TARGET, loadable=TARGET, last_good=version(6), recorded=frozenset({TARGET.id, version(6).id}))
    assert next_action(engine(state=EngineState.TAINTED, known=False), goals, LATER, NOW) == RefitTo(TARGET)


def test_a_tainted_engine_goes_by_way_of_the_last_good_version_when_the_target_has_no_record() -> None:
    goals = Goals(target=TARGET, loadable=TARGET, last_good=version(6), recorded=frozenset({version(6).id}))
    assert next_action(engine(state=EngineState.TAINTED, known=False), goals, LATER, NOW) == RefitTo(version(6))


def test_an_engine_that_the_service_died_on_in_mid_load_goes_to_the_target_at_once() -> None:
    """No load has failed. Nothing speaks against the target, and the last good version is a step back."""
    goals = Goals(target=TARGET, loadable=TARGET, last_good=version(6), recorded=frozenset({version(6).id}))
    cut_off = engine(state=EngineState.TAINTED, known=False, held=version(6).id)
    assert next_action(cut_off, goals, LATER, NOW) == RefitTo(TARGET)
    not_its_turn = replace(goals, loadable=version(6))
    assert next_action(cut_off, not_its_turn, LATER, NOW) == RefitTo(version(6))
    struck = cut_off.having(strikes={TARGET.id: 1})
    assert next_action(struck, goals, LATER, NOW) == RefitTo(version(6)), "it has left unknown contents here before"


@pytest.mark.parametrize("state", [EngineState.TAINTED, EngineState.QUARANTINED])
def test_an_engine_with_unknown_contents_is_never_resumed(state: EngineState) -> None:
    record = engine(state=state, known=False, resume_owed=True)
    for goals in (Goals(), GOALS):
        assert next_action(record, goals, Agenda(), NOW) != Resume()


def test_a_quarantined_engine_is_not_loaded_again_unasked() -> None:
    record = engine(state=EngineState.QUARANTINED, known=False)
    assert next_action(record, GOALS, LATER, NOW) == Rest(NOW + 5)


def test_an_engine_with_known_contents_that_may_be_paused_is_resumed() -> None:
    assert next_action(engine(serving=TARGET.id, resume_owed=True), GOALS, LATER, NOW) == Resume()


def test_an_unreachable_engine_is_probed_and_not_loaded() -> None:
    record = engine(state=EngineState.UNREACHABLE)
    assert next_action(record, GOALS, LATER, NOW) == Rest(NOW + 5)
    assert next_action(record, GOALS, Agenda(probe_at=NOW), NOW) == Probe()


def test_a_version_whose_files_were_deleted_after_the_load_goes_on_being_served() -> None:
    lost = version(7, state=VersionState.LOST, served_at="t")
    goals = Goals(target=lost, loadable=version(6), serving=lost)
    assert next_action(engine(serving=lost.id), goals, LATER, NOW) == Rest(NOW + 5)


def test_an_engine_without_weights_gets_the_newest_that_can_still_be_loaded() -> None:
    lost = version(7, state=VersionState.LOST, served_at="t")
    goals = Goals(target=lost, loadable=version(6))
    assert next_action(engine(state=EngineState.BEHIND), goals, LATER, NOW) == RefitTo(version(6))
    assert next_action(engine(serving=version(6).id), goals, LATER, NOW) == Rest(NOW + 5)


def test_a_version_never_goes_backwards_but_for_a_rollback() -> None:
    goals = Goals(target=version(6), loadable=version(6), serving=version(7))
    assert next_action(engine(serving=version(7).id), goals, LATER, NOW) == Rest(NOW + 5)
    rolled_back = replace(goals, serving=version(7, barred=True))
    assert next_action(engine(serving=version(7).id), rolled_back, LATER, NOW) == RefitTo(version(6))


def test_an_engine_leaves_what_was_rejected_when_it_was_read_again() -> None:
    """Its trainer had not written all of it when it was loaded."""
    rejected = version(7, state=VersionState.REJECTED, served_at="t")
    goals = Goals(target=version(6), loadable=version(6), serving=rejected)
    assert next_action(engine(serving=rejected.id), goals, LATER, NOW) == RefitTo(version(6))


def test_an_engine_stays_where_nothing_that_it_could_load_is_newer() -> None:
    waits = Goals(target=version(8), loadable=version(6), serving=version(7))
    stays = next_action(engine(state=EngineState.BEHIND, serving=version(7).id), waits, LATER, NOW)
    assert not isinstance(stays, RefitTo)
    older = replace(waits, serving=version(5))
    goes = next_action(engine(state=EngineState.BEHIND, serving=version(5).id), older, LATER, NOW)
    assert goes == RefitTo(version(6))


def test_an_engine_with_unknown_contents_stays_where_nothing_is_there_to_repair_it_with() -> None:
    tainted = engine(state=EngineState.TAINTED, known=False)
    assert not isinstance(next_action(tainted, Goals(target=TARGET), LATER, NOW), RefitTo)


def test_an_engine_with_nothing_to_load_makes_ready_what_is_coming_once() -> None:
    goals = replace(GOALS, coming="run~v000008")
    assert next_action(engine(serving=TARGET.id), goals, LATER, NOW) == Prefetch("run~v000008")
    assert next_action(engine(serving=TARGET.id), goals, replace(LATER, ahead="run~v000008"), NOW) == Rest(NOW + 5)
    assert next_action(engine(state=EngineState.BEHIND, serving="old"), goals, LATER, NOW) == RefitTo(TARGET)


def test_what_was_made_ready_for_nothing_is_let_go_of() -> None:
    agenda = replace(LATER, ahead="run~v000008")
    assert next_action(engine(serving=TARGET.id), GOALS, agenda, NOW) == CancelPrefetch()
    found = next_action(engine(state=EngineState.BEHIND, serving="old"), GOALS, agenda, NOW)
    assert found == RefitTo(TARGET)  # which makes itself ready in its place
