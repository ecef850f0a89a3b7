"""From whom followers pull: no two wait for each other, nobody sends more than a copy, and the hub sends few."""

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from refitd.policy.relays import REFUSED_SECONDS, Parents, RelayHost, home_of, hub_serves, plan_relays

ZONES = ("", "a", "b")


def fleet(count: int, children: int, zones: tuple[str, ...] = ("",)) -> list[RelayHost]:
    """So many followers that came one after the other, all of which hand on."""
    hosts: list[RelayHost] = []
    for number in range(count):
        zone = zones[number % len(zones)]
        home = home_of(zone, hosts, children)
        hosts.append(RelayHost(name=f"f{number}", number=number, home=home, zone=zone))
    return hosts


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, list[RelayHost]]:
    """Followers of any kind: in zones, unreachable, wrong, and with others that they avoid."""
    children = draw(st.integers(1, 4))
    hosts: list[RelayHost] = []
    for number in range(draw(st.integers(0, 24))):
        zone = draw(st.sampled_from(ZONES))
        home = home_of(zone, hosts, children) if draw(st.integers(0, 4)) else None
        avoids = frozenset(f"f{each}" for each in draw(st.sets(st.integers(0, 23), max_size=3)))
        used = bool(draw(st.integers(0, 5)))
        hosts.append(RelayHost(name=f"f{number}", number=number, home=home, zone=zone, is_used=used, avoids=avoids))
    return children, hosts


def edges(plan: dict[str, Parents]) -> list[tuple[int, str, str]]:
    """Stripe, child and parent of all that is not pulled from the hub."""
    return [(stripe, child, up) for child, ups in plan.items() for stripe, up in enumerate(ups) if up is not None]


def from_hub(plan: dict[str, Parents]) -> int:
    return sum(parents.count(None) for parents in plan.values())


def depth(plan: dict[str, Parents], stripe: int, name: str) -> int:
    """How many hands a stripe goes through on its way to a follower. Does not end where there is a cycle."""
    steps, at = 0, plan[name][stripe]
    while at is not None:
        steps, at = steps + 1, plan[at][stripe]
        assert steps <= len(plan), "a cycle"
    return steps


def without(dead: set[str], hosts: list[RelayHost]) -> list[RelayHost]:
    """The followers, as they are known once these have died."""
    return [replace(host, is_used=host.name not in dead, is_silent=host.name in dead) for host in hosts]


def check(children: int, hosts: list[RelayHost], plan: dict[str, Parents]) -> None:
    """What holds for each plan."""
    by_name = {host.name: host for host in hosts}
    assert set(plan) == set(by_name)
    sent = [parent for _, _, parent in edges(plan)]
    for stripe, child, parent in edges(plan):
        assert by_name[parent].is_used
        assert by_name[parent].home is not None
        assert parent not in by_name[child].avoids
        assert sent.count(parent) <= children
        depth(plan, stripe, child)


@given(fleets())
def test_no_follower_waits_for_itself_and_none_has_more_children_than_it_may(case: tuple[int, list[RelayHost]]) -> None:
    children, hosts = case
    check(children, hosts, plan_relays(hosts, children))


@given(fleets(), st.data())
def test_nobody_waits_for_itself_while_some_go_by_the_plan_before(
    case: tuple[int, list[RelayHost]], data: st.DataObject
) -> None:
    children, hosts = case
    older = plan_relays(hosts, children)
    stays = [replace(h, is_used=data.draw(st.booleans())) for h in hosts if data.draw(st.booleans())]
    newer = plan_relays(stays, children, older)
    check(children, stays, newer)
    mixed = {name: newer[name] if name in newer and data.draw(st.booleans()) else older[name] for name in older}
    for stripe in range(children):
        for name in mixed:
            depth(mixed, stripe, name)


@given(st.integers(1, 70), st.integers(1, 5))
def test_where_all_hand_on_the_hub_sends_less_than_two_copies_and_trees_are_flat(count: int, children: int) -> None:
    plan = plan_relays(fleet(count, children), children)
    assert from_hub(plan) < 2 * children
    if children > 1:
        deepest = max(depth(plan, stripe, name) for stripe in range(children) for name in plan)
        assert deepest <= math.ceil(math.log(count + 1, children)) + 2


@given(st.integers(1, 60), st.sampled_from([("",), ("a", "b"), ("a", "a", "b")]))
def test_with_two_children_each_the_hub_sends_one_copy(count: int, zones: tuple[str, ...]) -> None:
    assert from_hub(plan_relays(fleet(count, 2, zones), 2)) == 2


@given(fleets())
def test_nobody_pulls_from_another_zone_while_one_in_its_own_could_give_it(case: tuple[int, list[RelayHost]]) -> None:
    children, hosts = case
    plan = plan_relays(hosts, children)
    by_name = {host.name: host for host in hosts}
    sent = [parent for _, _, parent in edges(plan)]
    for stripe, child, parent in edges(plan):
        me = by_name[child]
        if by_name[parent].zone == me.zone:
            continue
        near = [h for h in hosts if h.zone == me.zone and h.home == stripe and h.is_used and h.name not in me.avoids]
        before = [h for h in near if (me.home != stripe, me.number) > (False, h.number) and h.name != child]
        assert all(sent.count(host.name) >= children for host in before)


def test_a_zone_gets_each_stripe_about_once_from_elsewhere() -> None:
    hosts = fleet(40, 2, ("a", "b"))
    plan = plan_relays(hosts, 2)
    zone = {host.name: host.zone for host in hosts}
    assert sum(zone[child] != zone[parent] for _, child, parent in edges(plan)) <= 4


def test_who_gave_wrong_bytes_gives_nothing_more_and_most_others_keep_whom_they_have() -> None:
    hosts = fleet(12, 2)
    older = plan_relays(hosts, 2)
    wrong = next(parent for _, _, parent in edges(older))
    newer = plan_relays([replace(host, is_used=host.name != wrong) for host in hosts], 2, older)
    assert wrong not in [parent for _, _, parent in edges(newer)]
    left = [edge for edge in edges(older) if edge[2] == wrong]
    kept = {edge for edge in edges(older) if edge[2] != wrong}
    assert len(kept - set(edges(newer))) <= len(left)  # at most one gives way for each that lost its relay


@given(st.integers(2, 60), st.integers(1, 4), st.data())
def test_where_followers_died_the_others_get_every_stripe_from_those_that_live(
    count: int, children: int, data: st.DataObject
) -> None:
    hosts = fleet(count, children)
    dead = {host.name for host in hosts if data.draw(st.integers(0, 9)) == 0}
    known = without(dead, hosts)
    newer = plan_relays(known, children, plan_relays(hosts, children))
    check(children, known, newer)
    assert not dead & {parent for _, _, parent in edges(newer)}
    living = [name for name in newer if name not in dead]
    deepest = max((depth(newer, stripe, name) for stripe in range(children) for name in living), default=0)
    assert children == 1 or deepest <= math.ceil(math.log(count + 1, children)) + 2 + len(dead)


def test_of_1000_followers_50_die_and_the_hub_sends_hardly_more() -> None:
    hosts = fleet(1000, 2)
    older = plan_relays(hosts, 2)
    dead = {f"f{number + index % 2}" for index, number in enumerate(range(7, 1000, 20))}  # as many of each stripe
    newer = plan_relays(without(dead, hosts), 2, older)
    assert from_hub(older) == 2
    assert from_hub({name: parents for name, parents in newer.items() if name not in dead}) <= 4
    assert max(depth(newer, stripe, name) for stripe in (0, 1) for name in newer) <= 12


def test_where_as_many_die_of_each_stripe_the_hub_sends_no_more_than_before_whoever_they_are() -> None:
    hosts = fleet(400, 2)
    older = plan_relays(hosts, 2)
    for seed in range(8):
        chance = random.Random(seed)
        homes = [[host.name for host in hosts if host.home == home] for home in (0, 1)]
        dead = {name for names in homes for name in chance.sample(names, 10)}
        newer = plan_relays(without(dead, hosts), 2, older)
        assert from_hub({name: parents for name, parents in newer.items() if name not in dead}) == from_hub(older)


def test_a_place_of_one_that_is_silent_goes_to_one_that_has_none() -> None:
    hosts = fleet(12, 2)
    older = plan_relays(hosts, 2)
    silent = "f11"
    lost = next(name for name, parents in older.items() if name != silent and "f3" in parents)
    known = [replace(h, is_silent=h.name == silent, avoids=frozenset({"f3"} if h.name == lost else ())) for h in hosts]
    newer = plan_relays(known, 2, older)
    check(2, known, newer)
    assert from_hub({name: parents for name, parents in newer.items() if name != silent}) <= 2


def test_one_that_is_silent_gives_to_others_only_where_no_other_can() -> None:
    first, second, third = fleet(3, 1)
    silent = replace(first, is_silent=True)
    assert plan_relays([silent, second, third], 1)["f2"] == ("f1",)
    assert plan_relays([silent, second], 1)["f1"] == ("f0",)


@given(
    st.integers(1, 4),
    st.floats(0, 100),
    st.none() | st.floats(0, 2 * REFUSED_SECONDS),
    st.data(),
)
def test_the_hub_refuses_only_who_has_a_relay_for_each_stripe_and_not_for_long(
    children: int, copies: float, refused: float | None, data: st.DataObject
) -> None:
    parents = tuple(data.draw(st.sampled_from([None, "a", "b"])) for _ in range(children))
    served = hub_serves(parents, copies, refused)
    assert served == (copies < children or None in parents or (refused or 0) >= REFUSED_SECONDS)


def test_a_follower_that_came_later_takes_over_from_the_hub() -> None:
    first, second = fleet(2, 2)
    alone = plan_relays([first], 2)
    assert alone == {"f0": (None, None)}
    assert plan_relays([first, second], 2, alone) == {"f0": (None, "f1"), "f1": ("f0", None)}


def test_those_that_nobody_can_reach_pull_from_those_that_can_be_and_else_from_the_hub() -> None:
    leaves = [RelayHost(name=f"leaf{number}", number=number, home=None) for number in range(3)]
    assert from_hub(plan_relays(leaves, 2)) == 6
    relay = RelayHost(name="relay", number=9, home=0)
    plan = plan_relays([*leaves, relay], 2)
    assert [parents.count("relay") for parents in plan.values()] == [1, 1, 0, 0]
