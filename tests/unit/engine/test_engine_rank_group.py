"""Whose handshakes belong to an engine, and whose sockets are believed."""

import stat
from typing import Any

import pytest

from refitd.engine.plugin import Launch
from refitd_client.contract.plugin import Handshake
from refitd_inside.client import EngineRankGroup, Member, Stock, rank_group_of, read_handshake
from refitd_inside.client.channels import FolderAccess, Peer, distrust, open_to_all

LAUNCH = Launch(port=30000, seed=42)
HELLO: dict[str, Any] = {
    "ok": True, "protocol": 1, "plugin": "0.1.0", "sglang": "0.5.23", "state": "on", "host": "a", "pid": 7,
    "port": 30000, "seed": 42, "rank": 0, "ranks": 1, "dp_rank": None, "model": {}, "served": "", "plan": None,
}  # fmt: skip


def member(**facts: Any) -> Member:
    handshake = read_handshake(HELLO | facts)
    assert isinstance(handshake, Handshake), handshake
    return Member(f"{handshake.rank}-1-ab.sock", handshake)


def why_stock(launch: Launch, *members: Member, faults: tuple[str, ...] = ()) -> str:
    found = rank_group_of(launch, members, faults)
    assert isinstance(found, Stock)
    return found.reason


def test_the_crew_is_who_has_the_port_and_the_seed_of_the_server() -> None:
    others = [member(port=30001), member(seed=43), member(port=None), member(seed=None)]
    rank_group = rank_group_of(LAUNCH, [*others, member()], ())
    assert isinstance(rank_group, EngineRankGroup)
    assert (rank_group.members, rank_group.release) == ((member(),), "0.1.0")
    assert why_stock(LAUNCH, *others) == "no plugin answers for it"


@pytest.mark.parametrize("launch", [Launch(port=None, seed=42), Launch(port=30000, seed=None)])
def test_a_server_that_does_not_say_how_it_was_started_has_no_crew(launch: Launch) -> None:
    assert why_stock(launch, member(port=launch.port, seed=launch.seed)) == "no plugin answers for it"


def test_every_rank_has_to_answer() -> None:
    two = Launch(port=30000, seed=42, ranks=2)
    both = member(rank=1, ranks=2), member(rank=0, ranks=2)
    rank_group = rank_group_of(two, both, ())
    assert isinstance(rank_group, EngineRankGroup)
    assert [each.handshake.rank for each in rank_group.members] == [0, 1]
    reason = why_stock(two, both[0], faults=("socket 0-1-ab.sock did not answer within 2 s",))
    assert reason == "only 1 of its 2 ranks answer for the plugin; socket 0-1-ab.sock did not answer within 2 s"
    assert why_stock(two, member()) == "no plugin answers for it"  # of a server with one rank


def test_data_parallel_ranks_have_ranks_of_their_own_unless_attention_alone_is_parallel() -> None:
    spread = Launch(port=30000, seed=42, ranks=2, dp_ranks=2)
    four = [member(rank=rank, ranks=2, dp_rank=dp) for dp in (0, 1) for rank in (0, 1)]
    rank_group = rank_group_of(spread, four, ())
    assert isinstance(rank_group, EngineRankGroup)
    assert [(each.handshake.dp_rank, each.handshake.rank) for each in rank_group.first] == [(0, 0), (1, 0)]
    assert "only 3 of its 4 ranks" in why_stock(spread, *four[1:])
    attention = Launch(port=30000, seed=42, ranks=2, dp_ranks=2, spread=False)
    assert isinstance(
        rank_group_of(attention, [member(rank=rank, ranks=2, dp_rank=rank) for rank in (0, 1)], ()), EngineRankGroup
    )


def test_with_attention_alone_in_parallel_the_first_rank_of_each_group_answers_an_update() -> None:
    launch = Launch(port=30000, seed=42, ranks=4, dp_ranks=2, spread=False)
    four = [member(rank=rank, ranks=4, dp_rank=rank // 2) for rank in (3, 1, 2, 0)]
    rank_group = rank_group_of(launch, four, ())
    assert isinstance(rank_group, EngineRankGroup)
    assert [each.handshake.rank for each in rank_group.first] == [0, 2]


@pytest.mark.parametrize("other", [{"host": "b"}, {"pid": 8}])
def test_engines_that_cannot_be_told_apart_are_left_to_themselves(other: dict[str, Any]) -> None:
    assert "cannot be told apart" in why_stock(LAUNCH, member(), member(**other))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            [{"state": "aside", "reason": "pipeline \x1b[31m parallelism"}],
            r"stands aside: pipeline \x1b[31m parallelism",
        ),
        ([{"ranks": 2}, {"ranks": 2, "rank": 1, "plugin": "0.2.0"}], "different releases"),
    ],
)
def test_a_crew_that_is_not_of_one_mind_is_none(facts: list[dict[str, Any]], reason: str) -> None:
    launch = Launch(port=30000, seed=42, ranks=len(facts))
    assert reason in why_stock(launch, *(member(**each) for each in facts))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({}, "speaks protocol None and refitd 1: install"),
        ({"protocol": "2" * 99}, "speaks protocol '2222222222222222222"),
        (HELLO | {"protocol": 2}, "speaks protocol 2 and refitd 1"),
        ({"protocol": 1, "ok": False}, "says hello in another form"),
        (HELLO | {"rank": "0"}, "says hello in another form"),
        (HELLO | {"state": "half on"}, "says hello in another form"),
        (HELLO | {"rank": 3, "ranks": 2}, "says that it is rank 3 of 2"),
    ],
)
def test_a_hello_that_is_none_is_told_as_such(reply: dict[str, Any], reason: str) -> None:
    said = read_handshake(reply)
    assert isinstance(said, str)
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("peer", "mode", "is_believed"),
    [
        (Peer(1000, {1000}), 0o770, True),  # the service's own user
        (Peer(0, {0}), 0o700, True),
        (Peer(2000, {2000}), 0o700, True),  # whose folder it is
        (Peer(3000, {3000, 500}), 0o770, True),  # of its group
        (Peer(3000, {3000, 500}), 0o750, False),  # which may not write
        (Peer(3000, {3000}), 0o770, False),
    ],
)
def test_a_socket_is_believed_that_only_those_could_make_whom_the_folder_is_for(
    peer: Peer, mode: int, *, is_believed: bool
) -> None:
    access = FolderAccess(uid=2000, gid=500, mode=stat.S_IFDIR | mode)
    reason = distrust(peer, access, own=1000)
    assert (reason is None) == is_believed
    assert is_believed or "belongs to user 3000" in (reason or "")
    assert not open_to_all(access)
    assert open_to_all(FolderAccess(uid=2000, gid=500, mode=0o777))
