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
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState
from support.records import version

EARLY, LATE = version(2, created_at="2026-01-01T00:00:00Z"), version(1, created_at="2030-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("versions", "target"),
    [
        ([version(5), version(7), version(6)], version(7)),
        ([version(900), version(3, generation=2)], version(3, generation=2)),  # a restarted trainer reuses steps
        ([EARLY, LATE], EARLY),
        ([version(5), version(6, barred=True)], version(5)),
        ([version(5), version(6, barred=True), version(7)], version(7)),
        ([version(1, state=VersionState.REJECTED)], None),
        *(
            ([version(5), version(9, state=state)], version(5))
            for state in VersionState
            if state is not VersionState.SEALED
        ),
    ],
)
def test_the_newest_good_version_is_the_target_whatever_order_or_clock_they_came_by(
    versions: list[VersionRecord], target: VersionRecord | None
) -> None:
    assert choose_target(versions) == target


def test_a_rollback_bars_all_that_is_newer_than_its_goal() -> None:
    assert to_bar([version(3), version(2), version(1)], version(2)) == [version(3)]
    assert to_bar([version(3), version(2), version(1)], version(1)) == [version(3), version(2)]


def test_versions_that_an_engine_passes_over_are_counted_as_skipped() -> None:
    versions = [version(step) for step in range(1, 6)]
    assert skipped_between(versions, version(1), version(5)) == [version(2), version(3), version(4)]
    assert skipped_between(versions, None, version(5)) == []


def test_a_served_version_whose_files_are_lost_stays_the_target_but_is_not_loaded() -> None:
    versions = [version(5), version(6, state=VersionState.LOST, served_at="t")]
    assert choose_target(versions) == versions[1]
    assert loadable(versions) == versions[0]


def test_a_rollback_goes_to_the_newest_version_that_was_served_and_has_its_files() -> None:
    assert last_good([version(1, served_at="t"), version(2, served_at="t"), version(3)]) == version(2, served_at="t")
    versions = [version(7, served_at="t"), version(6), version(5, served_at="t")]
    assert last_good_before(versions, versions[0]) == versions[2]
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
