"""What chaos plans: the same from the same seed, and as many rounds of each kind as asked for."""

from chaos.plan import Point, Victim, another_mid_load, rounds

ENGINES = ["embedded-1", "embedded-2", "sglang"]


def test_a_seed_gives_the_same_rounds_again() -> None:
    assert rounds(7, 50, 20, ENGINES, "sglang") == rounds(7, 50, 20, ENGINES, "sglang")
    assert rounds(7, 50, 20, ENGINES, "sglang") != rounds(8, 50, 20, ENGINES, "sglang")


def test_there_are_as_many_rounds_as_asked_for_and_every_victim_and_point_has_its_turn() -> None:
    plan = rounds(7, 200, 60, ENGINES, "sglang")
    kills = [round_ for round_ in plan if round_.victim is not Victim.STREAM]
    assert len(kills) == 200
    assert sum(round_.point is Point.MID_LOAD for round_ in kills) == 60
    assert {round_.victim for round_ in plan} == set(Victim)
    assert {round_.point for round_ in plan} == set(Point)
    assert len(plan) > 200


def test_without_a_real_sglang_no_round_needs_one() -> None:
    plan = rounds(7, 200, 60, ENGINES[:2], None)
    assert not any(round_.point is Point.MID_LOAD or round_.frozen for round_ in plan)
    assert {round_.engine for round_ in plan} == set(ENGINES[:2])


def test_a_round_that_makes_up_for_one_that_missed_hits_the_real_sglang_in_mid_load() -> None:
    again = another_mid_load(7, 213, "sglang")
    assert (again.number, again.point, again.engine) == (213, Point.MID_LOAD, "sglang")
