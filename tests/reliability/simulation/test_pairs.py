"""A prefill server and the one that decodes for it, through whatever comes: neither computes with other weights than
the other while both do, and both end on the target.
"""

import random
from contextlib import closing

import pytest

from refitd.policy.strategy import StrategyName
from simulation.disk import Make
from simulation.fault import Call, Fault
from simulation.place import PARTNER
from simulation.steps import CALLS, WRITTEN, Story
from simulation.world import World
from support.points import taken

STEPS = 40
HALVES = ("a", PARTNER)


def step(story: Story, chance: random.Random) -> None:
    """One thing that happens to the pair, or to the service or the trainer beside it."""
    half, seconds = chance.choice(HALVES), chance.choice([0.01, 0.2, 2.0])
    match chance.randrange(9):
        case 0 | 1:
            make = chance.choice([Make.GOOD] * 4 + WRITTEN)
            story.publish(make=make, announce=True, seconds=seconds)
        case 2:
            story.publish_a_delta(back=chance.choice([0, 0, 1]), announce=True, honest=True, seconds=seconds)
        case 3:
            call = chance.choice([Call.LOAD, Call.LOAD, *CALLS])
            story.update_goes_wrong(
                name=half, call=call, fault=chance.choice(list(Fault)), plain=chance.random() < 0.5, seconds=seconds
            )
        case 4:
            story.engine_is_killed(name=half)
            story.time_passes(seconds=seconds)
        case 5:
            story.engine_restarts(name=half)
        case 6:
            story.service_is_killed_and_started_again(seconds=seconds)
        case 7:
            story.another_writer_loads_into_an_engine(name=half, seconds=seconds, times=1)
        case _:
            story.roll_back()


@pytest.mark.points
@pytest.mark.parametrize("seed", [*taken(range(8))])
def test_a_pair_never_computes_with_two_policies_and_ends_on_the_target(seed: int) -> None:
    chance = random.Random(seed)
    with closing(World(seed, strategy=list(StrategyName)[seed % 3], pair=True)) as world:
        story = Story(world)
        story.publish(make=Make.GOOD, announce=True, seconds=2.0)
        for _ in range(STEPS):
            step(story, chance)
        world.heal()
        assert world.servers["a"].tensors == world.servers[PARTNER].tensors
        assert not world.servers[PARTNER].paused
