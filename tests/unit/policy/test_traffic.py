"""To which engines requests may go."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.policy.traffic import Demand, shut
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState
from support.records import engine, version

TARGET = version(7)
NOW = Demand(max_behind=0)


def serving(step: int, **fields: Any) -> EngineRecord:
    return engine(serving=version(step).id, **fields)


def asked(one: EngineRecord, demand: Demand = NOW, **known: Any) -> str | None:
    return shut(one, known.get("serving"), known.get("target", TARGET), demand)


@pytest.mark.parametrize("state", [EngineState.IN_SYNC, EngineState.BEHIND, EngineState.NACKED])
def test_requests_go_to_an_engine_that_is_proved_to_serve_the_target(state: EngineState) -> None:
    assert asked(serving(7, state=state)) is None


@pytest.mark.parametrize(
    "state",
    [
        EngineState.UNREACHABLE,
        EngineState.TAINTED,
        EngineState.QUARANTINED,
        EngineState.CONTESTED,
    ],
)
def test_no_request_goes_to_an_engine_of_whose_answers_nothing_is_known(state: EngineState) -> None:
    why = asked(serving(7, state=state, reason="so it is"))
    assert why is not None
    assert why.endswith(": so it is")


@pytest.mark.parametrize(
    "fields",
    [{"known": False}, {"resume_owed": True}, {"reload": True}, {"contest": "changed"}, {"taken": "by another"}],
)
def test_no_request_goes_to_an_engine_that_is_paused_to_be_loaded_again_or_contested(fields: dict[str, Any]) -> None:
    why = asked(serving(7, **fields))
    assert why is not None


def test_no_request_goes_to_a_new_engine_until_it_serves_a_version() -> None:
    assert asked(engine()) == "serves no version yet"
    assert asked(engine(), Demand()) == "serves no version yet"


def test_an_engine_may_be_as_far_behind_as_is_asked_for() -> None:
    assert asked(serving(5)) == "serves step 5, 2 behind step 7"
    assert asked(serving(5), Demand(max_behind=1)) is not None
    assert asked(serving(5), Demand(max_behind=2)) is None
    assert asked(serving(5), Demand()) is None


def test_a_later_step_than_the_target_is_not_behind_and_was_rolled_back_from() -> None:
    assert asked(serving(8)) is None
    told = "serves run~v000008, which is barred: it was rolled back from"
    assert asked(serving(8), serving=version(8, barred=True)) == told


def test_a_first_version_that_its_canary_refused_is_not_said_to_be_of_an_older_generation() -> None:
    refused = version(1, barred=True, given_up="the canary a failed its check: http://c says no: it answered 422: no")
    told = "serves run~v000001, which is barred: the canary a failed its check"
    assert asked(serving(1), serving=refused, target=None) == told
    assert asked(serving(1), serving=version(1), target=None) == ("serves run~v000001, and run run has no good version")


def test_a_version_of_an_earlier_generation_is_no_step_behind_but_of_another_training() -> None:
    again = version(3, generation=2)
    assert asked(serving(7), Demand(), target=again) is not None
    assert asked(engine(serving=again.id), target=again) is None


def test_an_engine_that_moves_to_another_run_answers_for_neither() -> None:
    moved = serving(7, run="next")
    assert asked(moved, Demand(run="run")) == "follows next, not run"
    assert asked(moved, Demand(run="next"), target=version(7, run="next")) is not None


def test_an_engine_that_is_updated_holds_requests_only_if_it_serves_what_is_asked_for() -> None:
    updated = serving(6, state=EngineState.UPDATING, resume_owed=True)
    assert asked(updated, Demand(max_behind=1)) == "is being updated"
    assert asked(replace(updated, state=EngineState.VERIFYING), Demand()) == "is being updated"
    assert asked(updated) == "serves step 6, 1 behind step 7"
    repaired = asked(updated.having(known=False), Demand())
    assert repaired is not None


def test_an_engine_that_has_yet_to_answer_a_service_that_was_restarted_is_not_known_to_be_another() -> None:
    probing = serving(7, state=EngineState.PROBING)
    assert asked(probing) == "has not answered yet since the service was started"
    assert asked(engine(state=EngineState.PROBING)) == "serves no version yet"
    assert asked(probing.having(resume_owed=True)) == "may still be paused"


def test_a_step_can_be_asked_for_exactly_or_from_there_on() -> None:
    assert asked(serving(7), Demand(step=6)) == "serves step 7, not 6"
    assert asked(serving(6), Demand(step=6)) is None
    assert asked(serving(7), Demand(step=6, or_later=True)) is None
    assert asked(serving(5), Demand(step=6, or_later=True)) == "serves step 5, not 6 or a later one"
