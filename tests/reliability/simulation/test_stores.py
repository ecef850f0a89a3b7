"""The promises on hosts that follow an object store, under whatever comes to it and to its users, in virtual time.

One in `STORE_SHARE` of the simulation's steps (`test_simulation.py`) is taken here, since each moves several services.
"""

from collections import Counter
from contextlib import closing
from itertools import count

import pytest

from refitd_client.contract.states import VersionState
from simulation.cases import drawn_of_stores
from simulation.sim_bucket import StoreCall, StoreFault
from simulation.store_world import StoreWorld
from simulation.test_simulation import FIRST, SHARES, STEPS, played_or_shortest

STORE_SHARE = 30
STORE_STEPS = max(STEPS // STORE_SHARE, 60 if STEPS > 1 else 1)


@pytest.mark.points
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_promise_holds_on_hosts_that_follow_a_store_under_whatever_comes(share: int) -> None:
    seen, seeds, steps = Counter[str](), count(FIRST + share, SHARES), -(-(STORE_STEPS - share) // SHARES)
    while seen["steps"] < steps:
        seen += _seen(next(seeds))
    print(dict(seen))


def _seen(seed: int) -> Counter[str]:
    story = played_or_shortest(drawn_of_stores(seed), seed)
    assert isinstance(story.world, StoreWorld)
    seen = Counter({"steps": story.steps})
    for host in story.world.hosts:
        seen += host.disk.counts
    return seen + story.world.counts


def test_of_two_trainers_the_one_that_moves_the_pointer_second_says_so_and_goes_on_saying_so() -> None:
    with closing(StoreWorld(1, followers=1, pushed=False)) as world:
        world.publish_to_store(0, delta=False, within=10.0)
        world.publish_to_store(1, delta=False, within=10.0)
        for _ in range(3):
            world.publish_to_store(0, delta=False, within=10.0)
            assert world.trainer(0).is_lost
        pointer = world.watch.pointer
        assert pointer is not None
        assert [version.id for version in pointer.versions] == ["run~v000001.g2", "run~v000001"]
        world.heal()


@pytest.mark.parametrize("pushed", [False, True])
def test_what_a_hub_wanted_does_not_hold_back_a_trainer_that_takes_its_run_over(pushed: bool) -> None:
    with closing(StoreWorld(2, followers=1, pushed=pushed)) as world:
        for _ in range(2):
            world.publish_to_store(0, delta=False, within=20.0, then=10.0)
        world.roll_back_in_store(0, within=10.0)
        world.wait(10.0)
        assert world.hosts[0].following().serves == "run~v000001"
        world.publish_to_store(1, delta=False, within=10.0, then=10.0)
        assert world.hosts[0].following().serves == "run~v000001.g2"
        world.heal()


def test_a_version_that_a_slow_follower_pulls_stays_by_its_note_and_goes_when_that_has_ended() -> None:
    with closing(StoreWorld(3, followers=1, pushed=False)) as world:
        (host,) = world.hosts
        world.slow(host.name, 40.0)
        world.publish_to_store(0, delta=False, within=10.0, then=3.0)
        assert host.following().pulling == "run~v000001"
        for _ in range(3):
            world.publish_to_store(1, delta=False, within=10.0)
        world.goes_wrong(host.name, StoreCall.LOOK, [StoreFault.FAILS] * 200)  # it does not hear of anything newer
        world.wait(18.0)
        world.collect(keep=1, within=5.0)
        world.wait(18.0)
        world.collect(within=5.0)
        done = world.collectors[-1].done
        assert done is not None
        assert done.waiting == ("run~v000001",)
        assert host.following().pulling == "run~v000001"
        world.heal()


def test_what_trainers_and_collectors_leave_that_are_killed_at_any_moment_goes_after_its_time() -> None:
    with closing(StoreWorld(4, followers=1, pushed=False)) as world:
        for at in range(24):
            world.publish_to_store(0, delta=False, within=0.0)
            world.wait(at * 0.004)
            world.restart_store_trainer(0, back=at % 2)
        world.publish_to_store(0, delta=False, within=10.0, then=95.0)
        for at in range(12):
            world.collect(within=at * 0.008, killed=True)
        world.heal()
        assert world.counts["collected"] > 0


def test_bytes_of_a_store_that_are_damaged_on_their_way_are_pulled_again_and_reach_no_engine() -> None:
    with closing(StoreWorld(5, followers=2)) as world:
        for call in (StoreCall.READ, StoreCall.FILL, StoreCall.LOOK):
            world.goes_wrong("host0", call, [StoreFault.WRONG, StoreFault.CUT, StoreFault.LOST, StoreFault.WRONG])
        world.publish_to_store(0, delta=False, within=20.0, then=30.0)
        assert world.counts["fill wrong"] == 2
        assert len({host.following().serves for host in world.hosts}) == 1
        world.heal()


def test_a_hub_that_comes_again_with_nothing_to_push_leaves_the_run_to_its_publisher_and_says_so() -> None:
    with closing(StoreWorld(6, followers=1, pushed=True)) as world:
        world.publish_to_store(0, delta=False, within=20.0)
        world.publish_to_store(1, delta=False, within=10.0)
        world.restart_store_trainer(0, back=0)
        world.wait(20.0)
        assert world.hub is not None
        assert world.hub.life is not None
        fault = world.hub.life.store.faults.push
        assert fault is not None
        assert "another publisher has the run" in fault
        world.publish_to_store(1, delta=False, within=10.0, then=10.0)
        assert world.hosts[0].following().serves == "run~v000002.g2"
        world.heal()


def test_followers_stay_on_a_version_whose_files_their_hub_has_lost_and_go_back_when_it_is_rolled_back() -> None:
    with closing(StoreWorld(7, followers=1, pushed=True)) as world:
        for _ in range(3):
            world.publish_to_store(0, delta=False, within=20.0, then=10.0)
        assert world.hub is not None
        world.lose_files_of_hub(then=10.0)
        assert world.hub.life is not None
        assert world.hub.life.store.versions["run~v000003"].state is VersionState.LOST
        world.restart_store_trainer(0, back=0)
        world.wait(20.0)
        assert world.hosts[0].following().serves == "run~v000003"
        world.roll_back_in_store(0, within=10.0)
        world.wait(20.0)
        assert world.hosts[0].following().serves == "run~v000002"
        world.heal()
