"""Reports that come late, and hosts that have one name."""

from contextlib import suppress

import pytest

from refitd.state.followers import LEASE_SECONDS, MOST, Followers, SupersededError, TooManyFollowersError
from refitd_client.contract.follow import Following, HostReport

V1, V2 = "run~v000001", "run~v000002"


class Clock:
    """Stands still unless a test moves it."""

    seconds = 0.0

    def now(self) -> str:
        return "2026-01-01T00:00:00Z"

    def monotonic(self) -> float:
        return self.seconds


def report(process: str, number: int = 1, *pulls: str, name: str = "node") -> HostReport:
    told = Following(follower=name, upstream="", upstreams=[], process=process)
    return HostReport(told=told, number=number, pulls=pulls)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def followers(clock: Clock) -> Followers:
    return Followers(clock)


def test_a_report_that_comes_twice_or_after_a_later_one_counts_for_nothing(followers: Followers) -> None:
    assert followers.reported(report("a", 1))
    assert followers.reported(report("a", 3, V1))
    assert not followers.reported(report("a", 3, V2))
    assert not followers.reported(report("a", 2, V2))
    assert list(followers.pulled()) == [("node", V1)]


def test_a_report_of_an_earlier_process_of_a_host_is_refused_however_late_it_comes(followers: Followers) -> None:
    for process in ("a", "b", "c"):
        assert followers.reported(report(process))
    for process in ("a", "b"):
        with pytest.raises(SupersededError, match="give each host a name of its own, --follower"):
            followers.reported(report(process, 9))
    assert followers.reported(report("c", 2))


@pytest.mark.parametrize("late", [report("b", 2, V2), report("a", 9, V2)])
def test_a_report_that_is_late_by_a_minute_counts_for_nothing_though_the_host_was_silent_since(
    followers: Followers, clock: Clock, late: HostReport
) -> None:
    followers.reported(report("a", 1))
    followers.reported(report("b", 3, V1))
    clock.seconds += 60
    with suppress(SupersededError):
        assert not followers.reported(late)
    assert (list(followers.pulled()), dict(followers.known)) == ([], {})
    assert followers.reported(report("b", 4, V1))
    assert list(followers.pulled()) == [("node", V1)]


def test_what_a_host_pulls_is_kept_until_its_lease_ends(followers: Followers, clock: Clock) -> None:
    followers.reported(report("a", 1, V1))
    clock.seconds += LEASE_SECONDS + 1
    assert list(followers.pulled()) == []


def test_there_are_at_most_so_many(followers: Followers) -> None:
    for number in range(MOST):
        followers.reported(report("p", name=f"host-{number}"))
    with pytest.raises(TooManyFollowersError):
        followers.reported(report("p", name="one more"))
