"""The promises on several hosts, under whatever comes to hub, followers and links, in virtual time.

One in `SHARE` of the simulation's steps (`test_simulation.py`) is taken here, since each moves several services.
"""

from collections import Counter
from contextlib import closing
from itertools import count

import pytest

from simulation.cases import drawn_of_hosts
from simulation.disk import Make
from simulation.hosts import Hosts
from simulation.links import Damage
from simulation.test_simulation import FIRST, SHARES, STEPS, played_or_shortest

SHARE = 30
HOST_STEPS = max(STEPS // SHARE, 100 if STEPS > 1 else 1)


@pytest.mark.points
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_promise_holds_on_several_hosts_under_whatever_comes(share: int) -> None:
    seen, seeds, steps = Counter[str](), count(FIRST + share, SHARES), -(-(HOST_STEPS - share) // SHARES)
    while seen["steps"] < steps:
        seen += _seen(next(seeds))
    print(dict(seen))


def _seen(seed: int) -> Counter[str]:
    """What happened in the case of a seed."""
    story = played_or_shortest(drawn_of_hosts(seed), seed)
    seen = Counter({"steps": story.steps})
    assert isinstance(story.world, Hosts)
    for host in story.world.hosts:
        seen += host.disk.counts + Counter({"slots": host.promises.recycled})
    return seen + story.world.counts


def test_bytes_that_are_damaged_on_their_way_are_pulled_again_and_reach_no_engine() -> None:
    with closing(Hosts(1, followers=2)) as world:
        world.publish(Make.GOOD, announce=True)
        world.damage(0, [Damage.WRONG, Damage.REORDERED, Damage.CUT, Damage.STALL, Damage.LOST])
        world.wait(30.0)
        assert {"wrong", "reordered", "cut", "stall"} <= world.counts.keys()
        assert [host.following().serves for host in world.hosts] == ["run~v000001", "run~v000001"]
        world.heal()


def test_a_version_that_is_collected_while_a_follower_pulls_it_slowly_is_kept_or_given_up_for_a_newer_one() -> None:
    with closing(Hosts(2, followers=2)) as world:
        world.slow(0, 3.0)
        for _ in range(8):
            world.publish(Make.GOOD, announce=True)
            world.wait(6.0)
            world.sweep()
        world.slow(0, 0.0)
        world.heal()
        assert [host.following().serves for host in world.hosts] == ["run~v000008", "run~v000008"]


def test_a_follower_that_is_killed_in_a_pull_leaves_nothing_that_counts_and_nothing_that_stays() -> None:
    with closing(Hosts(3, followers=1)) as world:
        (host,) = world.hosts
        for _ in range(6):
            world.publish(Make.GOOD, announce=True)
            world.slow(0, 1.0)
            world.wait(6.0)
            host.kill()
            world.wait(1.0)
            host.start()
            world.slow(0, 0.0)
            world.wait(2.0)
        world.heal()
        assert host.disk.counts["killed in a pull"] > 0


def test_hosts_go_to_nothing_newer_while_the_hub_has_paused_the_run_and_have_it_at_hand_when_it_goes_on() -> None:
    with closing(Hosts(4, followers=2)) as world:
        world.publish(Make.GOOD, announce=True)
        world.wait(10.0)
        world.pause_rollouts(paused=True)
        world.publish(Make.GOOD, announce=True)
        world.wait(20.0)
        assert [host.following().serves for host in world.hosts] == ["run~v000001", "run~v000001"]
        assert all("run/v000002" in host.disk.folders for host in world.hosts)
        world.heal()
        assert [host.following().serves for host in world.hosts] == ["run~v000002", "run~v000002"]


def test_a_host_that_was_cut_off_goes_back_with_its_hub_also_while_that_has_paused_the_run() -> None:
    with closing(Hosts(5, followers=1)) as world:
        for _ in range(2):
            world.publish(Make.GOOD, announce=True)
            world.wait(10.0)
        world.cut(0, cut=True)
        world.roll_back()
        world.wait(5.0)
        world.pause_rollouts(paused=True)
        world.cut(0, cut=False)
        world.wait(20.0)
        assert world.hosts[0].following().serves == "run~v000001"
        world.heal()


def test_what_was_pulled_of_a_version_that_the_hub_takes_back_goes_though_all_else_is_as_before() -> None:
    with closing(Hosts(6, followers=1)) as world:
        (host,) = world.hosts
        for _ in range(2):
            world.publish(Make.GOOD, announce=True)
            world.wait(10.0)
        world.slow(0, 1.0)
        world.publish(Make.GOOD, announce=True)
        while not host.disk.being_written():
            world.wait(0.5)
        world.roll_back()
        world.slow(0, 0.0)
        world.wait(30.0)
        assert host.disk.left_behind() == []
        world.heal()
