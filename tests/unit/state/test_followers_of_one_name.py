"""Followers on hosts that have one host name, and so one name at the hub."""

import pytest

from refitd.state.followers import LEASE_SECONDS, MOST, Followers
from refitd_client.contract.follow import FollowerReport

V1, V2 = "run~v000001", "run~v000002"


class Clock:
    """Stands still unless a test moves it."""

    seconds = 0.0

    def now(self) -> str:
        return "2026-01-01T00:00:00Z"

    def monotonic(self) -> float:
        return self.seconds


def report(process: str, *pulls: str) -> FollowerReport:
    return FollowerReport(follower="node", process=process, url=f"http://{process}:8700", pulls=pulls)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def followers(clock: Clock) -> Followers:
    return Followers(clock)


def test_two_followers_of_one_name_are_told_of_once(followers: Followers) -> None:
    assert followers.reported(report("a")) is None
    assert followers.reported(report("b")) is None, "the first may have been restarted"
    told = followers.reported(report("a"))
    assert told == (
        "two followers call themselves node (at http://a:8700 and http://b:8700): "
        "give each a name of its own, --follower"
    )
    assert followers.reported(report("b")) is None, "it was said"


def test_a_follower_that_was_restarted_is_no_second_one(followers: Followers) -> None:
    for process in ("a", "a", "b", "b", "c"):
        assert followers.reported(report(process)) is None


def test_what_either_of_two_followers_of_one_name_pulls_is_kept(followers: Followers, clock: Clock) -> None:
    followers.reported(report("a", V1))
    followers.reported(report("b", V2))
    assert sorted(followers.pulled()) == [("node", V1), ("node", V2)]
    followers.reported(report("a"))
    assert list(followers.pulled()) == [("node", V2)]
    clock.seconds += LEASE_SECONDS + 1
    assert list(followers.pulled()) == []


def test_one_that_reports_as_ever_other_processes_takes_no_more_memory_than_all_followers_may(
    followers: Followers,
) -> None:
    for number in range(2 * MOST + 10):
        followers.reported(report(f"p{number}", V1))
    assert len(list(followers.pulled())) == 2 * MOST
