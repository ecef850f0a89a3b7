"""To which engines requests may go."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.policy.traffic import Demand, shut
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState
from support.records import engine, version

TARGET = version(7)
NOW, ANY = Demand(max_behind=0), Demand()
AWAY = (EngineState.UNREACHABLE, EngineState.QUARANTINED)


def serving(step: int, **fields: Any) -> EngineRecord:
    return engine(serving=version(step).id, **fields)


def asked(one: EngineRecord, demand: Demand = NOW, **known: Any) -> str | None:
    return shut(one, known.get("serving"), known.get("target", TARGET), demand)


@pytest.mark.parametrize("state", [EngineState.IN_SYNC, EngineState.BEHIND, EngineState.NACKED])
def test_requests_go_to_an_engine_that_is_proved_to_serve_the_target(state: EngineState) -> None:
    assert asked(serving(7, state=state)) is None


@pytest.mark.parametrize(
    "fields",
    [
        *({"state": s, "reason": "so it is"} for s in (*AWAY, EngineState.TAINTED, EngineState.CONTESTED)),
        *({"known": False}, {"resume_owed": True}, {"reload": True}, {"contest": "changed"}, {"taken": "by another"}),
    ],
)
def test_no_request_goes_to_an_engine_that_is_paused_or_of_whose_answers_nothing_is_known(
    fields: dict[str, Any],
) -> None:
    why = asked(serving(7, **fields))
    assert why is not None
    assert "reason" not in fields or why.endswith(": so it is")


UPDATED = serving(6, state=EngineState.UPDATING, resume_owed=True)
PROBING = serving(7, state=EngineState.PROBING)


@pytest.mark.parametrize(
    ("one", "demand", "why"),
    [
        (engine(), NOW, "serves no version yet"),
        (engine(), ANY, "serves no version yet"),
        (serving(5), NOW, "serves step 5, 2 behind step 7"),
        (serving(5), Demand(max_behind=1), "serves step 5, 2 behind step 7"),
        (serving(5), Demand(max_behind=2), None),
        (serving(5), ANY, None),
        (serving(8), NOW, None),
        (serving(7), Demand(step=6), "serves step 7, not 6"),
        (serving(6), Demand(step=6), None),
        (serving(7), Demand(step=6, or_later=True), None),
        (serving(5), Demand(step=6, or_later=True), "serves step 5, not 6 or a later one"),
        # One that is updated holds requests only if it serves what is asked for.
        (UPDATED, Demand(max_behind=1), "is being updated"),
        (replace(UPDATED, state=EngineState.VERIFYING), ANY, "is being updated"),
        (UPDATED, NOW, "serves step 6, 1 behind step 7"),
        (UPDATED.having(known=False), ANY, "has unknown contents, and is being repaired"),
        # One that has yet to answer a restarted service is not known to be another.
        (PROBING, NOW, "has not answered yet since the service was started"),
        (engine(state=EngineState.PROBING), NOW, "serves no version yet"),
        (PROBING.having(resume_owed=True), NOW, "may still be paused"),
        (serving(7, run="next"), Demand(run="run"), "follows next, not run"),
    ],
)
def test_why_no_request_goes_to_an_engine(one: EngineRecord, demand: Demand, why: str | None) -> None:
    assert asked(one, demand) == why


def test_a_version_that_is_barred_or_of_another_training_is_called_that() -> None:
    told = "serves run~v000008, which is barred: it was rolled back from"
    assert asked(serving(8), serving=version(8, barred=True)) == told
    refused = version(1, barred=True, given_up="the canary a failed its check: http://c says no: it answered 422: no")
    told = "serves run~v000001, which is barred: the canary a failed its check"
    assert asked(serving(1), serving=refused, target=None) == told
    assert asked(serving(1), serving=version(1), target=None) == "serves run~v000001, and run run has no good version"
    again = version(3, generation=2)
    assert asked(serving(7), ANY, target=again) is not None
    assert asked(engine(serving=again.id), target=again) is None
    assert asked(serving(7, run="next"), Demand(run="next"), target=version(7, run="next")) is not None
