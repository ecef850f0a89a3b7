"""Whether a version is served, and how a wait for it stands."""

from typing import Any

import pytest

from refitd.policy.traffic import is_proven, outcome_of
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from support.records import engine, version

SERVED, SEALED, PENDING = WaitOutcome.SERVED, WaitOutcome.SEALED, WaitOutcome.PENDING
FAILED, SUPERSEDED = WaitOutcome.FAILED, WaitOutcome.SUPERSEDED


@pytest.mark.parametrize(
    ("other", "proven"),
    [
        ({"serving": "v7"}, True),
        ({"serving": "v6"}, False),
        ({"serving": "v6", "state": EngineState.UNREACHABLE}, True),
        ({"serving": "v6", "state": EngineState.QUARANTINED}, True),
        ({"state": EngineState.PROBING}, False),  # it was not asked yet
        ({"serving": "v7", "known": False}, False),
        ({"serving": "v7", "resume_owed": True}, False),  # it may still be paused
    ],
)
def test_served_means_proven_on_every_engine_that_is_waited_for(other: dict[str, Any], proven: bool) -> None:
    assert is_proven("v7", [engine("a", serving="v7"), engine("b", **other)], 1) is proven


def test_nothing_is_served_by_no_engine_nor_by_fewer_than_the_quorum() -> None:
    assert not is_proven("v7", [], 1)
    assert not is_proven("v7", [engine(state=EngineState.UNREACHABLE, serving="v7")], 1)
    assert not is_proven("v7", [engine("a", serving="v7")], 2)


@pytest.mark.parametrize("state", [VersionState.RETIRED, VersionState.DELETED])
@pytest.mark.parametrize("target", [None, version(6), version(9)])
@pytest.mark.parametrize("proven", [True, False])
def test_nothing_is_called_served_by_what_was_collected_since(
    state: VersionState, target: VersionRecord | None, proven: bool
) -> None:
    assert outcome_of(version(7, served_at="t", state=state), target, SERVED, proven=proven) is SUPERSEDED


LOST = version(7, served_at="t", state=VersionState.LOST)
BACK = version(6, served_at="t")


@pytest.mark.parametrize(
    ("waited", "target", "proven", "outcome"),
    [
        (version(7, served_at="t"), version(9), False, SERVED),  # served once is served
        (version(7, served_at="t", barred=True), version(6), True, FAILED),  # not after a rollback
        (version(7, served_at="t", barred=True, state=VersionState.DELETED), version(6), True, FAILED),
        (version(7, barred=True), version(6), False, FAILED),
        (LOST, LOST, True, SERVED),  # as long as engines hold it
        (LOST, LOST, False, FAILED),
        (LOST, None, False, FAILED),
        (LOST, version(6), True, FAILED),
        (LOST, version(9), True, SUPERSEDED),
        (version(7, state=VersionState.REJECTED), None, False, FAILED),
        (version(7, state=VersionState.LOST), None, False, FAILED),
        (version(7), version(8), False, SUPERSEDED),
        (version(7), version(7), False, PENDING),
        *((version(7, state=state), None, False, PENDING) for state in VersionState if state.is_open),
        (BACK, BACK, False, PENDING),  # a rollback's goal is served when the engines are there
        (BACK, BACK, True, SERVED),
    ],
)
def test_how_a_wait_for_served_stands(
    waited: VersionRecord, target: VersionRecord | None, proven: bool, outcome: WaitOutcome
) -> None:
    assert outcome_of(waited, target, SERVED, proven=proven) is outcome


def test_a_sealed_version_is_what_a_wait_for_sealed_waits_for() -> None:
    assert outcome_of(version(7), version(7), SEALED, proven=False) is SEALED
