"""Which version engines are to serve."""

import pytest

from refitd.policy.goals import (
    LoadableDeltas,
    choose_target,
    last_good,
    last_good_before,
    loadable,
    skipped_between,
    to_bar,
    unserved_before,
)
from refitd_client.contract.states import Kind, VersionState
from support.records import version


def test_the_newest_sealed_version_is_the_target_whatever_order_they_came_in() -> None:
    assert choose_target([version(5), version(7), version(6)]) == version(7)


@pytest.mark.parametrize("state", [state for state in VersionState if state is not VersionState.SEALED])
def test_a_version_that_is_not_sealed_is_never_the_target(state: VersionState) -> None:
    assert choose_target([version(5), version(9, state=state)]) == version(5)


def test_a_trainer_restart_that_reuses_step_numbers_wins_over_later_steps_of_the_old_generation() -> None:
    assert choose_target([version(900), version(3, generation=2)]) == version(3, generation=2)


def test_clocks_do_not_matter() -> None:
    early, late = version(2, created_at="2026-01-01T00:00:00Z"), version(1, created_at="2030-01-01T00:00:00Z")
    assert choose_target([early, late]) == early


def test_a_barred_version_is_not_the_target_and_a_newer_one_is() -> None:
    versions = [version(5), version(6, barred=True)]
    assert choose_target(versions) == version(5)
    assert choose_target([*versions, version(7)]) == version(7)


def test_without_a_good_version_there_is_no_target() -> None:
    assert choose_target([version(1, state=VersionState.REJECTED)]) is None


def test_the_last_good_version_is_the_newest_that_was_served() -> None:
    assert last_good([version(1, served_at="t"), version(2, served_at="t"), version(3)]) == version(2, served_at="t")


def test_a_rollback_without_a_goal_bars_the_current_version_alone() -> None:
    assert to_bar([version(3), version(2), version(1)], version(2)) == [version(3)]


def test_a_rollback_to_a_version_bars_all_that_is_newer() -> None:
    assert to_bar([version(3), version(2), version(1)], version(1)) == [version(3), version(2)]


def test_versions_that_an_engine_passes_over_are_counted_as_skipped() -> None:
    versions = [version(step) for step in range(1, 6)]
    assert skipped_between(versions, version(1), version(5)) == [version(2), version(3), version(4)]
    assert skipped_between(versions, None, version(5)) == []


def test_a_served_version_whose_files_are_lost_stays_the_target_but_is_not_loaded() -> None:
    versions = [version(5), version(6, state=VersionState.LOST, served_at="t")]
    assert choose_target(versions) == versions[1]
    assert loadable(versions) == versions[0]


def test_a_version_that_was_lost_before_it_was_served_is_no_target() -> None:
    assert choose_target([version(5), version(6, state=VersionState.LOST)]) == version(5)


def test_a_rollback_goes_to_the_last_good_version_and_not_to_one_that_no_engine_proved() -> None:
    versions = [version(7, served_at="t"), version(6), version(5, served_at="t")]
    assert last_good_before(versions, versions[0]) == versions[2]


def test_a_rollback_never_goes_to_a_version_whose_files_are_lost() -> None:
    lost = version(6, served_at="t", state=VersionState.LOST)
    assert last_good_before([version(7), lost, version(5, served_at="t")], version(7)) == version(5, served_at="t")


def test_what_was_never_served_is_offered_to_who_wants_to_go_back_newest_first() -> None:
    others = [version(3, state=VersionState.LOST), version(2, barred=True), version(4, served_at="t"), version(9)]
    assert unserved_before([version(5), version(6), *others], version(8)) == [version(6), version(5)]


def test_what_has_to_be_finished_stays_the_target_as_long_as_it_is_good() -> None:
    versions = [version(7), version(8)]
    assert choose_target(versions, version(7).id) == loadable(versions, version(7).id) == version(7)
    assert choose_target([version(7, barred=True), version(8)], version(7).id) == version(8)


def test_what_cannot_be_carried_out_any_more_is_not_waited_for() -> None:
    """As a delta whose base is lost: engines that were restarted would never get there, nor to anything newer."""
    served = version(7, kind=Kind.DELTA, base=version(6).id, served_at="t")
    versions, carriage = [served, version(8)], LoadableDeltas(refused={served.id: "its base is LOST"})
    assert choose_target(versions, served.id, [served.id], carriage) == version(8)
    assert choose_target([served], served.id, [served.id], carriage) == served
