"""What to do next with one engine."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.policy.next_action import (
    Action,
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
DUE, LATER = Agenda(probe_at=NOW), Agenda(probe_at=NOW + 5)
RESTS = Rest(NOW + 5)
TARGET, GOOD = version(7), version(6)
GOALS = Goals(target=TARGET, loadable=TARGET)
BEHIND = {"state": EngineState.BEHIND, "serving": "old"}
TAINTED = {"state": EngineState.TAINTED, "known": False}
LOST = version(7, state=VersionState.LOST, served_at="t")
BACK = Goals(target=GOOD, loadable=GOOD, serving=TARGET)
RECORDED = replace(GOALS, last_good=GOOD, recorded=frozenset({GOOD.id}))
COMING = "run~v000008"


@pytest.mark.parametrize(
    ("fields", "goals", "agenda", "action"),
    [
        ({"state": EngineState.PROBING}, GOALS, Agenda(), Probe()),
        (BEHIND, GOALS, LATER, RefitTo(TARGET)),
        ({"serving": TARGET.id}, GOALS, LATER, RESTS),
        ({"serving": TARGET.id}, GOALS, DUE, Probe()),
        ({"serving": TARGET.id, "resume_owed": True}, GOALS, LATER, Resume()),
        ({"state": EngineState.UNREACHABLE}, GOALS, LATER, RESTS),
        ({"state": EngineState.UNREACHABLE}, GOALS, DUE, Probe()),
        # Files that were deleted after the load: what it serves goes on, and others get what can still be loaded.
        ({"serving": LOST.id}, Goals(target=LOST, loadable=GOOD, serving=LOST), LATER, RESTS),
        ({"state": EngineState.BEHIND}, Goals(target=LOST, loadable=GOOD), LATER, RefitTo(GOOD)),
        ({"serving": GOOD.id}, Goals(target=LOST, loadable=GOOD), LATER, RESTS),
        # Never backwards, but for a rollback or where what it serves was rejected when it was read again.
        ({"serving": TARGET.id}, BACK, LATER, RESTS),
        ({"serving": TARGET.id}, replace(BACK, serving=version(7, barred=True)), LATER, RefitTo(GOOD)),
        (
            {"serving": TARGET.id},
            replace(BACK, serving=version(7, state=VersionState.REJECTED, served_at="t")),
            LATER,
            RefitTo(GOOD),
        ),
        # What can be loaded now is not newer than what it serves, or is.
        (BEHIND | {"serving": TARGET.id}, replace(BACK, target=version(8)), LATER, RESTS),
        (BEHIND, replace(BACK, target=version(8), serving=version(5)), LATER, RefitTo(GOOD)),
        # Unknown contents are repaired with what is on record, and are never resumed.
        (TAINTED, replace(RECORDED, recorded=frozenset({TARGET.id, GOOD.id})), LATER, RefitTo(TARGET)),
        (TAINTED, RECORDED, LATER, RefitTo(GOOD)),
        (TAINTED | {"strikes": {GOOD.id: 3}}, RECORDED, LATER, RefitTo(TARGET)),  # its own record may be wrong
        (TAINTED | {"resume_owed": True}, Goals(target=TARGET), LATER, RESTS),
        (TAINTED | {"state": EngineState.QUARANTINED, "resume_owed": True}, GOALS, LATER, RESTS),
        # What is still being checked is prepared once, or forgotten.
        ({"serving": TARGET.id}, replace(GOALS, coming=COMING), LATER, Prefetch(COMING)),
        ({"serving": TARGET.id}, replace(GOALS, coming=COMING), replace(LATER, ahead=COMING), RESTS),
        (BEHIND, replace(GOALS, coming=COMING), LATER, RefitTo(TARGET)),
        ({"serving": TARGET.id}, GOALS, replace(LATER, ahead=COMING), CancelPrefetch()),
        (BEHIND, GOALS, replace(LATER, ahead=COMING), RefitTo(TARGET)),
    ],
)
def test_what_an_engine_does_next(fields: dict[str, Any], goals: Goals, agenda: Agenda, action: Action) -> None:
    assert next_action(engine(**fields), goals, agenda, NOW) == action


def test_a_failed_version_waits_for_its_back_off_and_a_newer_one_does_not() -> None:
    agenda, nacked = replace(LATER, failed=TARGET.id, retry_at=NOW + 1), engine(state=EngineState.NACKED, serving="old")
    assert next_action(nacked, GOALS, agenda, NOW) == Rest(NOW + 1)
    assert next_action(nacked, GOALS, agenda, NOW + 1) == RefitTo(TARGET)
    assert next_action(nacked, Goals(target=version(8), loadable=version(8)), agenda, NOW) == RefitTo(version(8))


def test_an_engine_that_the_service_died_on_in_mid_load_goes_to_the_target_at_once() -> None:
    """No load has failed. Nothing speaks against the target, and the last good version is a step back."""
    cut_off = engine(**TAINTED, held=GOOD.id)
    assert next_action(cut_off, RECORDED, LATER, NOW) == RefitTo(TARGET)
    assert next_action(cut_off, replace(RECORDED, loadable=GOOD), LATER, NOW) == RefitTo(GOOD), "not its turn"
    struck = cut_off.having(strikes={TARGET.id: 1})
    assert next_action(struck, RECORDED, LATER, NOW) == RefitTo(GOOD), "it has left unknown contents here before"
