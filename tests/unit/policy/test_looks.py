"""How often engines are looked at: as the operator says, and less often where there are very many."""

import random
from dataclasses import replace

import pytest

from refitd.policy.next_action import (
    LONGEST_AT_REST_SECONDS,
    LONGEST_LOOK_SECONDS,
    LOOKS_AT_REST_A_SECOND,
    at_rest,
    until_look,
)
from refitd.state.records import Believed, EngineRecord
from refitd_client.contract.states import EngineState


class _At(random.Random):
    """The chance that is given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def test_up_to_eighty_engines_are_looked_at_as_often_as_the_operator_says() -> None:
    for engines in (1, 64, 80):
        for rests, arrives in ((True, False), (True, True), (False, False)):
            assert until_look(2.0, engines, _At(0.9), rests=rests, arrives=arrives) == 2.0
    assert until_look(60.0, 1000, _At(1.0), rests=False) == 60.0 == until_look(60.0, 1000, _At(1.0), rests=True)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_a_thousand_engines_at_rest_are_about_forty_looks_a_second_and_others_are_looked_at_as_the_operator_says(
    chance: float,
) -> None:
    assert 20.0 <= until_look(2.0, 1000, _At(chance), rests=True) < 30.1
    assert until_look(2.0, 200, _At(chance), rests=False) == 2.0
    assert 8.0 <= until_look(2.0, 1000, _At(chance), rests=False) < 12.1  # unless they are all of them


def test_looks_are_spread_also_right_after_an_update_that_ended_everywhere_at_once() -> None:
    chance = random.Random(1)
    looks: list[float] = []
    for _ in range(1000):
        at = until_look(2.0, 1000, chance, rests=True, arrives=True)
        while at < 150.0:
            looks.append(at)
            at += until_look(2.0, 1000, chance, rests=True)
    busiest = max(sum(second <= at < second + 1 for at in looks) for second in range(150))
    assert busiest < 2 * LOOKS_AT_REST_A_SECOND
    assert len(looks) / 150 < 1.1 * LOOKS_AT_REST_A_SECOND


@pytest.mark.parametrize("engines", [1000, 100_000])
def test_no_engine_is_left_alone_for_long_however_many_there_are(engines: int) -> None:
    assert until_look(2.0, engines, _At(1.0), rests=False) < 1.21 * LONGEST_LOOK_SECONDS
    assert until_look(2.0, engines, _At(1.0), rests=True) < 1.21 * LONGEST_AT_REST_SECONDS


def test_an_engine_that_is_paused_or_on_its_way_to_another_version_is_not_at_rest() -> None:
    engine = EngineRecord(
        id="one", url="http://one", state=EngineState.IN_SYNC, run="run", contents=Believed(serving="run~v000001")
    )
    assert at_rest(engine, "run~v000001")
    assert at_rest(engine, None)
    assert not at_rest(engine, "run~v000002")
    assert not at_rest(engine.having(resume_owed=True), "run~v000001")
    for state in set(EngineState) - {EngineState.IN_SYNC}:
        assert not at_rest(replace(engine, state=state), "run~v000001")
