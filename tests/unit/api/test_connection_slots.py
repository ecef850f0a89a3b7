"""Which connections a server keeps when there are more than it takes."""

import pytest

from refitd.api.connection import Admission, ConnectionSlots, Taken, admission, peer_of

SLOTS = ConnectionSlots(all=4, peer=2, health=1)
NOW = 10.0


def taken(key: int, peer: str = "a", waits_since: float | None = None, *, health_only: bool = False) -> Taken:
    return Taken(key=key, peer=peer, waits_since=waits_since, health_only=health_only)


def test_a_connection_gets_a_place_while_there_is_one() -> None:
    assert admission("a", [taken(1), taken(2, "b"), taken(3, "b")], SLOTS, NOW) == Admission()


def test_of_a_peer_with_all_of_its_places_the_connection_makes_room_that_has_waited_longest() -> None:
    there = [taken(1, waits_since=2.0), taken(2, waits_since=1.0), taken(3, "b", waits_since=0.5)]
    assert admission("a", there, SLOTS, NOW) == Admission(closes=2)


def test_a_peer_that_sends_many_requests_at_once_loses_none_of_them_while_there_are_places() -> None:
    there = [taken(1, waits_since=NOW - 0.01), taken(2, waits_since=NOW - 0.01)]
    assert admission("a", there, SLOTS, NOW) == Admission()
    there += [taken(3, waits_since=NOW), taken(4, "b", waits_since=NOW - 0.02)]
    assert admission("a", there, SLOTS, NOW) == Admission(closes=1), "all are taken: that peer makes room by itself"


def test_where_all_places_are_taken_a_peer_with_more_than_its_own_makes_room() -> None:
    there = [taken(1, "a", NOW), taken(2, "a", NOW), taken(3, "a", NOW), taken(4, "b", 1.0)]
    assert admission("c", there, SLOTS, NOW) == Admission(closes=1)


def test_where_all_places_are_taken_the_connection_makes_room_that_has_waited_longest() -> None:
    there = [taken(1, "a", 3.0), taken(2, "b", 1.0), taken(3, "c"), taken(4, "d", 2.0)]
    assert admission("e", there, SLOTS, NOW) == Admission(closes=2)


def test_where_a_request_is_answered_on_each_only_health_is_left() -> None:
    assert admission("a", [taken(1), taken(2)], SLOTS, NOW) == Admission(health_only=True)
    assert admission("e", [taken(key, str(key)) for key in range(4)], SLOTS, NOW) == Admission(health_only=True)


def test_a_connection_for_health_that_waits_makes_room_for_the_next() -> None:
    there = [taken(1), taken(2), taken(3, waits_since=1.0, health_only=True)]
    assert admission("a", there, SLOTS, NOW) == Admission(health_only=True, closes=3)
    there[2] = taken(3, health_only=True)
    assert not admission("a", there, SLOTS, NOW).is_in


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", "::ffff:127.0.0.2", True),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_addresses_that_one_client_can_choose_from_are_one_peer(one: str, other: str, is_same: bool) -> None:
    assert (peer_of((one, 1)) == peer_of((other, 2))) is is_same


def test_a_unix_socket_is_a_local_peer() -> None:
    assert peer_of(None) == peer_of(("127.0.0.1", 1))
