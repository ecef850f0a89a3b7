"""The promises on several hosts, under whatever comes to hub, followers and links, in virtual time.

One in `SHARE` of the simulation's steps (`test_simulation.py`) is taken here, since each moves several services.
"""

import shutil
from collections import Counter
from contextlib import closing
from itertools import count

import pytest

from refitd.policy.strategy import StrategyName
from refitd_client.contract.states import EngineState
from simulation.cases import drawn_of_hosts
from simulation.disk import Make
from simulation.forgetting import ForgettingHosts
from simulation.hosts import Host, Hosts
from simulation.led_hosts import LedHosts
from simulation.links import Damage
from simulation.orders import Stage
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


@pytest.mark.parametrize("world_of", [Hosts, LedHosts])
def test_a_version_that_is_collected_while_a_follower_pulls_it_slowly_is_kept_or_given_up_for_a_newer_one(
    world_of: type[Hosts],
) -> None:
    with closing(world_of(2, followers=2)) as world:
        world.slow(0, 3.0)
        for _ in range(8):
            world.publish(Make.GOOD, announce=True, then=6.0)
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
        world.publish(Make.GOOD, announce=True, then=10.0)
        world.pause_updates(paused=True)
        world.publish(Make.GOOD, announce=True, then=20.0)
        assert [host.following().serves for host in world.hosts] == ["run~v000001", "run~v000001"]
        assert all("run/v000002" in host.disk.folders for host in world.hosts)
        world.heal()
        assert [host.following().serves for host in world.hosts] == ["run~v000002", "run~v000002"]


def test_a_host_that_was_cut_off_goes_back_with_its_hub_also_while_that_has_paused_the_run() -> None:
    with closing(Hosts(5, followers=1)) as world:
        for _ in range(2):
            world.publish(Make.GOOD, announce=True, then=10.0)
        world.cut(0, cut=True)
        world.roll_back()
        world.wait(5.0)
        world.pause_updates(paused=True)
        world.cut(0, cut=False)
        world.wait(20.0)
        assert world.hosts[0].following().serves == "run~v000001"
        world.heal()


def test_what_was_pulled_of_a_version_that_the_hub_takes_back_goes_though_all_else_is_as_before() -> None:
    with closing(Hosts(6, followers=1)) as world:
        (host,) = world.hosts
        for _ in range(2):
            world.publish(Make.GOOD, announce=True, then=10.0)
        world.slow(0, 1.0)
        world.publish(Make.GOOD, announce=True)
        while not host.disk.being_written():
            world.wait(0.5)
        world.roll_back()
        world.slow(0, 0.0)
        world.wait(30.0)
        assert host.disk.left_behind() == []
        world.heal()


def until_it_is_ordered(world: LedHosts, stage: Stage) -> None:
    """Two hosts serve the first version, have pulled the second one, and the order of it to the first host has come to
    a stage.
    """
    world.publish(Make.GOOD, announce=True, then=20.0)
    assert served(world) == ["run~v000001", "run~v000001"]
    world.pause_updates(paused=True)
    world.publish(Make.GOOD, announce=True)
    world.wait(20.0)  # it is pulled ahead
    world.slow(0, 1.0)
    since = world.book.counts["host0", stage]
    world.pause_updates(paused=False)
    world.until_an_order(0, stage, since)


@pytest.mark.parametrize("stage", Stage)
def test_a_hub_that_is_killed_in_the_middle_of_an_order_to_its_hosts_brings_them_to_its_target_when_it_is_back(
    stage: Stage,
) -> None:
    with closing(LedHosts(1, followers=2)) as world:
        until_it_is_ordered(world, stage)
        world.kill()
        world.wait(20.0)
        heard = "run~v000001" if stage in {Stage.DECIDED, Stage.SENT} else "run~v000002"
        assert served(world)[0] == heard, "what it has heard it carries out by itself"
        world.heal()
        assert served(world) == ["run~v000002", "run~v000002"]
        assert [states(world, host.name) for host in world.hosts] == [(EngineState.IN_SYNC, "2")] * 2


@pytest.mark.parametrize("stage", Stage)
def test_a_host_that_is_killed_in_the_middle_of_an_order_serves_what_its_hub_wants_when_it_is_back(
    stage: Stage,
) -> None:
    with closing(LedHosts(1, followers=2)) as world:
        until_it_is_ordered(world, stage)
        world.hosts[0].kill()
        world.wait(70.0)
        assert served_by(world.hosts[1]) == "run~v000002", "it holds up no other"
        assert states(world, "host0")[0] is EngineState.UNREACHABLE
        world.hosts[0].start()
        world.heal()
        assert served(world) == ["run~v000002", "run~v000002"]


@pytest.mark.parametrize("stage", Stage)
def test_clocks_that_jump_on_the_hub_and_on_a_host_change_nothing_of_an_order(stage: Stage) -> None:
    with closing(LedHosts(1, followers=2)) as world:
        until_it_is_ordered(world, stage)
        world.set_wall_clock(400.0)
        world.hosts[0].set_wall_clock(-400.0)
        world.wait(30.0)
        assert served(world) == ["run~v000002", "run~v000002"]
        assert [states(world, host.name) for host in world.hosts] == [(EngineState.IN_SYNC, "2")] * 2
        world.set_wall_clock(0.0)
        world.hosts[0].set_wall_clock(0.0)
        world.publish(Make.GOOD, announce=True, then=30.0)
        assert served(world) == ["run~v000003", "run~v000003"]
        world.heal()


@pytest.mark.parametrize("lost", [Damage.LOST, Damage.CUT, Damage.SLOW])
@pytest.mark.parametrize("back", [False, True])
def test_reports_and_replies_that_are_lost_or_late_cost_the_time_to_the_next_and_nothing_else(
    lost: Damage, back: bool
) -> None:
    with closing(LedHosts(1, followers=2)) as world:
        for _ in range(2):
            world.publish(Make.GOOD, announce=True, then=20.0)
        if back:
            world.roll_back()
        else:
            world.publish(Make.GOOD, announce=True)
        for host in range(2):
            world.damage_orders(host, [lost] * 4, [])
        world.wait(90.0)
        goal = "run~v000001" if back else "run~v000003"
        assert served(world) == [goal, goal]
        assert {states(world, host.name)[0] for host in world.hosts} == {EngineState.IN_SYNC}
        world.heal()


def test_a_reply_of_a_hub_whose_lead_is_over_is_not_obeyed_also_after_a_restart_of_the_host() -> None:
    with closing(of_a_group(followers=1)) as world:
        (host,) = world.hosts
        for _ in range(2):
            world.publish(Make.GOOD, announce=True, then=15.0)
            world.kill()
            world.start()
            world.wait(15.0)
        world.publish(Make.GOOD, announce=True, then=15.0)
        assert host.following().fence == world.epoch
        world.order_as_another(0, 0, behind=1)
        host.kill()
        host.start()
        world.order_as_another(0, 0, behind=1)
        assert world.counts["refused orders"] == 2
        world.wait(15.0)
        assert served(world) == ["run~v000003"]
        world.heal()


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_restarts_takes_its_host_not_back_from_what_was_ordered_while_others_are_first(
    paused: bool,
) -> None:
    """Or while an operator has paused the run."""
    with closing(LedHosts(7, strategy=StrategyName.ROLLING, followers=2)) as world:
        host = world.hosts[0]
        assert len(host.servers) > 1
        world.publish(Make.GOOD, announce=True, then=30.0)
        world.slow(1, 4.0)
        world.publish(Make.GOOD, announce=True)
        while states(world, host.name) != (EngineState.IN_SYNC, "2"):
            world.wait(0.5)
        world.pause_updates(paused=paused)
        host.start_engine("a")
        desired: set[str | None] = set()
        for _ in range(40):
            world.wait(0.2)
            desired.add(host.following().desired)
        assert (desired, served(world)) == ({"run~v000002"}, ["run~v000002", "run~v000001"])
        world.heal()


def test_a_host_that_is_led_and_hears_no_answer_to_its_reports_goes_nowhere_by_itself() -> None:
    with closing(LedHosts(3, followers=1)) as world:
        world.publish(Make.GOOD, announce=True, then=15.0)
        world.pause_updates(paused=True)
        world.publish(Make.GOOD, announce=True)
        world.damage(0, [], [Damage.LOST, Damage.LOST])
        world.hosts[0].kill()
        world.hosts[0].start()
        world.wait(20.0)
        assert served(world) == ["run~v000001"]
        world.heal()
        assert served(world) == ["run~v000002"]


def test_a_follower_whose_root_in_memory_is_empty_at_its_start_pulls_again() -> None:
    with closing(Hosts(7, followers=1)) as world:
        (host,) = world.hosts
        world.publish(Make.GOOD, announce=True, then=15.0)
        host.kill()
        host.disk.exchange(service=None, contents={})
        host.start_engine("a")
        host.start()
        world.wait(60.0)
        assert "run/v000001" in host.disk.folders
        assert served(world) == ["run~v000001"]
        world.heal()


@pytest.mark.parametrize("service", [None, "another service"])
@pytest.mark.parametrize("world_of", [Hosts, LedHosts])
def test_a_follower_that_finds_another_root_in_place_of_its_own_says_so_writes_nothing_there_and_loads_nothing_from_it(
    service: str | None, world_of: type[Hosts]
) -> None:
    """An empty one, as of a file system that is not mounted, or one of another service that has trained a run of the
    same name. When its own is back it goes on by itself.
    """
    with closing(world_of(8, followers=1)) as world:
        (host,) = world.hosts
        world.publish(Make.GOOD, announce=True, then=15.0)
        host.kill()
        contents = {} if service is None else {"run/v000001": 10**6, "run/v000002": 10**6 + 1}
        own = host.disk.exchange(service=service, contents=contents, kind="ext4")
        before = host.disk.everything()
        host.start_engine("a")
        host.start()
        world.publish(Make.GOOD, announce=True, then=60.0)
        assert host.life is not None
        told = host.life.store.faults.root
        assert told is not None
        assert ("is another root" if service else "has no .refitd/id") in told
        assert host.following().serves is None
        assert host.disk.everything() == before
        host.kill()
        shutil.rmtree(host.disk.root)
        own.rename(host.disk.root)
        host.start()
        world.heal()
        assert served(world) == ["run~v000002"]


def served(world: Hosts) -> list[str | None]:
    return [served_by(host) for host in world.hosts]


def served_by(host: Host) -> str | None:
    return host.following().serves


def states(world: LedHosts, host: str) -> tuple[EngineState, str | None]:
    record = world.record_of(host)
    assert record is not None
    return record.state, record.contents.weight_version


def of_a_group(*, followers: int) -> LedHosts:
    """A world whose hub belongs to a group: each of its starts is a takeover."""
    worlds = (LedHosts(seed, followers=followers) for seed in count())
    for world in worlds:
        if world.is_grouped:
            return world
        world.close()
    raise AssertionError


def test_a_host_whose_reports_are_not_answered_goes_nowhere_though_it_has_pulled_what_is_good() -> None:
    with closing(LedHosts(3, followers=1)) as world:
        world.hosts[0].kill()
        world.cut_orders(0, cut=True)
        world.publish(Make.GOOD, announce=True, then=3.0)
        world.hosts[0].start()
        world.wait(20.0)
        assert served(world) == [None]
        world.heal()
        assert served(world) == ["run~v000001"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_of", [ForgettingHosts, LedHosts])
def test_hosts_do_not_go_back_with_a_hub_that_is_restored_from_a_backup_until_its_operator_rolls_back(
    world_of: type[ForgettingHosts], seed: int
) -> None:
    with closing(world_of(seed, followers=2)) as world:
        world.publish(Make.GOOD, announce=True, then=20.0)
        world.back_up()
        world.publish(Make.GOOD, announce=True, then=20.0)
        world.lose_disk(emptied=False, begins=False)
        for host in world.hosts:
            for engine in host.servers:
                host.start_engine(engine)
        world.wait(60.0)
        assert served(world) == ["run~v000002", "run~v000002"]
        world.roll_back("run~v000001")
        world.wait(60.0)
        assert served(world) == ["run~v000001", "run~v000001"]
        world.heal()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_of", [ForgettingHosts, LedHosts])
def test_a_trainer_that_begins_again_after_its_hub_was_emptied_is_followed_by_hosts_without_an_operator(
    world_of: type[ForgettingHosts], seed: int
) -> None:
    with closing(world_of(seed, followers=2)) as world:
        for _ in range(3):
            world.publish(Make.GOOD, announce=True, then=20.0)
        world.lose_disk(emptied=True, begins=False)
        world.wait(20.0)
        world.begin_training_again()
        for step in (1, 2):
            world.publish(Make.GOOD, announce=True, then=90.0)
            assert served(world) == [f"run~v00000{step}.g2"] * 2
        assert not [what for what in world.counts if what.startswith("operator")]
        world.heal()
