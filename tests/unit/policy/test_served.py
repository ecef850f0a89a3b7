"""Whether a version is served, and how a wait for it stands."""

import pytest

from refitd.policy.traffic import is_proven, outcome_of
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from support.records import engine, version

SERVED, SEALED = WaitOutcome.SERVED, WaitOutcome.SEALED


def test_served_means_proven_on_every_reachable_engine() -> None:
    assert is_proven("v7", [engine("a", serving="v7"), engine("b", serving="v7")], 1)
    assert not is_proven("v7", [engine("a", serving="v7"), engine("b", serving="v6")], 1)


@pytest.mark.parametrize("state", [EngineState.UNREACHABLE, EngineState.QUARANTINED])
def test_a_dead_engine_holds_up_nobody(state: EngineState) -> None:
    assert is_proven("v7", [engine("a", serving="v7"), engine("b", serving="v6", state=state)], 1)


def test_an_engine_that_has_not_been_asked_yet_is_waited_for() -> None:
    assert not is_proven("v7", [engine("a", serving="v7"), engine("b", state=EngineState.PROBING)], 1)


def test_nothing_is_served_by_no_engine() -> None:
    assert not is_proven("v7", [], 1)
    assert not is_proven("v7", [engine(state=EngineState.UNREACHABLE, serving="v7")], 1)


def test_a_quorum_can_ask_for_more_engines() -> None:
    assert not is_proven("v7", [engine("a", serving="v7")], 2)


def test_contents_that_are_not_known_prove_nothing() -> None:
    assert not is_proven("v7", [engine("a", serving="v7", known=False)], 1)


def test_an_engine_that_may_still_be_paused_does_not_serve_yet() -> None:
    assert not is_proven("v7", [engine("a", serving="v7", resume_owed=True)], 1)


def test_a_version_that_was_served_once_was_served() -> None:
    assert outcome_of(version(7, served_at="t"), version(9), SERVED, proven=False) is SERVED


@pytest.mark.parametrize("state", [VersionState.SEALED, VersionState.DELETED])
def test_what_was_rolled_back_from_is_not_called_served_though_it_was(state: VersionState) -> None:
    left = version(7, served_at="t", barred=True, state=state)
    assert outcome_of(left, version(6), SERVED, proven=True) is WaitOutcome.FAILED


@pytest.mark.parametrize("state", [VersionState.RETIRED, VersionState.DELETED])
@pytest.mark.parametrize("target", [None, version(6), version(9)])
@pytest.mark.parametrize("proven", [True, False])
def test_nothing_is_called_served_by_what_was_collected_since(
    state: VersionState, target: VersionRecord | None, proven: bool
) -> None:
    collected = version(7, served_at="t", state=state)
    assert outcome_of(collected, target, SERVED, proven=proven) is WaitOutcome.SUPERSEDED


def test_what_lost_its_files_is_served_as_long_as_engines_hold_it_and_no_longer() -> None:
    lost = version(7, served_at="t", state=VersionState.LOST)
    assert outcome_of(lost, lost, SERVED, proven=True) is SERVED
    assert outcome_of(lost, lost, SERVED, proven=False) is WaitOutcome.FAILED
    assert outcome_of(lost, None, SERVED, proven=False) is WaitOutcome.FAILED
    assert outcome_of(lost, version(6), SERVED, proven=True) is WaitOutcome.FAILED
    assert outcome_of(lost, version(9), SERVED, proven=True) is WaitOutcome.SUPERSEDED


@pytest.mark.parametrize("state", [VersionState.REJECTED, VersionState.LOST])
def test_a_bad_version_has_failed(state: VersionState) -> None:
    assert outcome_of(version(7, state=state), None, SERVED, proven=False) is WaitOutcome.FAILED


def test_a_version_that_a_newer_one_overtook_is_superseded() -> None:
    assert outcome_of(version(7), version(8), SERVED, proven=False) is WaitOutcome.SUPERSEDED


def test_a_version_that_was_rolled_back_from_has_failed() -> None:
    assert outcome_of(version(7, barred=True), version(6), SERVED, proven=False) is WaitOutcome.FAILED


def test_a_sealed_version_is_what_a_wait_for_sealed_waits_for() -> None:
    assert outcome_of(version(7), version(7), SEALED, proven=False) is SEALED
    assert outcome_of(version(7), version(7), SERVED, proven=False) is WaitOutcome.PENDING


@pytest.mark.parametrize("state", [state for state in VersionState if state.is_open])
def test_a_version_without_a_verdict_is_pending(state: VersionState) -> None:
    assert outcome_of(version(7, state=state), None, SERVED, proven=False) is WaitOutcome.PENDING


def test_a_version_that_is_rolled_back_to_is_served_when_the_engines_are_there() -> None:
    goal = version(6, served_at="t")
    assert outcome_of(goal, goal, SERVED, proven=False) is WaitOutcome.PENDING
    assert outcome_of(goal, goal, SERVED, proven=True) is SERVED
