"""When a version goes out as a delta: every reason for a full one, and the base that engines agree on."""

import threading

import numpy as np
import pytest

from refitd_client.contract.states import EngineState
from refitd_client.delta import maker as served
from refitd_client.delta.change import ChangeHistory, StepChanges, last_served, plan_delta
from refitd_client.publish.options import DeltaRules
from refitd_client.publish.ports import Full
from support.stand_in_service import make_engine

RULES = DeltaRules(threshold=0.1, anchor_every=4)
BASE = "exp~v000007"


def test_little_that_changed_since_a_served_version_is_a_delta() -> None:
    assert plan_delta(BASE, 1, 0, RULES, elements=100) == BASE
    assert plan_delta(BASE, 10, 2, RULES, elements=100) == BASE
    assert plan_delta(BASE, 0, 0, RULES, elements=0) == BASE


def test_without_a_base_its_reason_is_the_reason() -> None:
    assert plan_delta(Full("nobody knows"), 0, 0, RULES, elements=100) == Full("nobody knows")


def test_many_changes_and_anchors_are_full() -> None:
    assert isinstance(plan_delta(BASE, 11, 0, RULES, elements=100), Full)
    assert isinstance(plan_delta(BASE, 1, 3, RULES, elements=100), Full)
    assert isinstance(plan_delta(BASE, 0, 0, DeltaRules(anchor_every=1), elements=100), Full)


@pytest.mark.parametrize("rules", [{"threshold": -0.1}, {"threshold": 1.1}, {"anchor_every": 0}])
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is"):
        DeltaRules(**rules)  # pyright: ignore[reportArgumentType]


def test_the_oldest_version_that_engines_serve_is_the_base() -> None:
    """By generation and step: as texts they would be in another order."""
    engines = [make_engine(version=f"exp~v{version}") for version in ("000009.g2", "1000000.g2", "000010.g2")]
    assert last_served(engines, "exp") == "exp~v000009.g2"
    assert last_served([*engines, make_engine(version="exp~v2000000")], "exp") == "exp~v2000000"


def test_engines_that_are_gone_do_not_count_and_others_must_serve_something() -> None:
    gone = make_engine(state=EngineState.UNREACHABLE, version=None)
    assert last_served([gone, make_engine(version=BASE)], "exp") == BASE
    assert isinstance(last_served([gone], "exp"), Full)
    assert isinstance(last_served([make_engine(version=None), make_engine(version=BASE)], "exp"), Full)
    assert isinstance(last_served([make_engine(version="other~v000001")], "exp"), Full)
    assert isinstance(last_served([make_engine(version=BASE, run="other")], "exp"), Full)


def test_a_service_that_keeps_its_answer_to_itself_holds_up_a_trainer_no_longer_than_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many requests it is asked in, and however slowly it answers each."""
    monkeypatch.setattr(served, "BASE_DEADLINE", 0.01)
    told = threading.Event()

    def ask() -> str:
        told.wait(10)
        return BASE

    asked = served.BaseQuery(ask)
    assert asked.answer() == Full("the service did not say what engines serve within 0.01 s")
    told.set()
    monkeypatch.setattr(served, "BASE_DEADLINE", 10)
    assert served.BaseQuery(ask).answer() == BASE


def step(version: str, *indices: int, before: int = 0) -> StepChanges:
    return StepChanges(version=version, indices={"w": np.array(indices, np.uint32)}, before={"w": before})


def test_a_base_in_the_middle_has_the_changes_after_it() -> None:
    history = ChangeHistory("v1", 100)
    history.add(step("v2", 1, 5, before=11))
    history.add(step("v3", 2, 5, before=12))
    last = step("v4", 9, before=13)
    assert history.since("v1", last).indices["w"].tolist() == [1, 2, 5, 9]
    since = history.since("v2", last)
    assert since.indices["w"].tolist() == [2, 5, 9]
    assert since.before == {"w": 12}  # the fingerprint in v2
    assert history.since("v3", last).indices["w"].tolist() == [9]
    assert since.changed == 3


def test_only_what_there_is_room_for_is_remembered() -> None:
    """And what nobody serves any more is forgotten."""
    history = ChangeHistory("v1", 4)
    for number in range(2, 6):
        history.add(step(f"v{number}", number, number + 10))
    assert [history.knows(f"v{number}") for number in range(1, 6)] == [False, False, True, True, True]
    history.forget_before("v4")
    assert [history.knows(f"v{number}") for number in range(3, 6)] == [False, True, True]
    history.add(step("v6", 1, 2, 3, 4, 5))
    assert [history.knows(f"v{number}") for number in (4, 5, 6)] == [False, True, True]
