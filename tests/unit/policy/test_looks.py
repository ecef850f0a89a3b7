"""How often engines in sync are looked at: as the operator says, and less often where there are very many."""

import random

import pytest

from refitd.policy.next_action import LONGEST_LOOK_SECONDS, until_look


class _At(random.Random):
    """The chance that is given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("engines", [1, 64, 200])
def test_up_to_two_hundred_engines_are_looked_at_as_often_as_the_operator_says(engines: int) -> None:
    assert until_look(2.0, engines, _At(0.9)) == 2.0


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_a_thousand_engines_are_about_a_hundred_looks_a_second(chance: float) -> None:
    assert 8.0 <= until_look(2.0, 1000, _At(chance)) < 12.1


def test_looks_are_spread_after_a_rollout_that_ended_everywhere_at_once() -> None:
    chance = random.Random(1)
    waits = [until_look(2.0, 1000, chance) for _ in range(1000)]
    busiest = max(sum(at <= wait < at + 0.1 for wait in waits) for at in [each / 10 for each in range(80, 120)])
    assert busiest < 60  # of a thousand, in a tenth of a second


@pytest.mark.parametrize("engines", [1000, 100_000])
def test_no_engine_is_left_alone_for_long_however_many_there_are(engines: int) -> None:
    assert until_look(2.0, engines, _At(1.0)) < 1.21 * LONGEST_LOOK_SECONDS


def test_an_operator_who_wants_fewer_looks_gets_fewer() -> None:
    assert until_look(60.0, 1000, _At(1.0)) == 60.0
