"""Reports that come late, and hosts that have one name."""

from contextlib import suppress

import pytest

from refitd_client.contract.follow import Following, HostReport
from refitd_hosts.hub.followers import (
    LEASE_SECONDS,
    MOST,
    MOST_REFUSED,
    SAID_FOR_SECONDS,
    Followers,
    RefusedReports,
    SupersededError,
    TooManyFollowersError,
)

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


def refused(followers: Followers, number: int) -> bool:
    """Report as the process that was there first; whether its refusal is the first."""
    with pytest.raises(SupersededError) as error:
        followers.reported(report("a", number))
    return error.value.is_first


def test_a_host_takes_its_name_back_from_a_second_process_that_was_killed(followers: Followers, clock: Clock) -> None:
    followers.reported(report("a", 1))
    followers.reported(report("b", 1, V2))
    for number in range(2, 3 + int(LEASE_SECONDS)):
        refused(followers, number)
        clock.seconds += 1
    assert followers.reported(report("a", 100, V1))
    assert list(followers.pulled()) == [("node", V1)]
    with pytest.raises(SupersededError):
        followers.reported(report("b", 2))


def test_while_the_second_process_reports_the_first_stays_refused(followers: Followers, clock: Clock) -> None:
    followers.reported(report("a", 1))
    for number in range(1, 200):
        assert followers.reported(report("b", number))
        refused(followers, number + 1)
        clock.seconds += 1


def test_two_processes_of_one_name_are_said_once_and_show_while_both_report(followers: Followers, clock: Clock) -> None:
    followers.reported(report("a", 1))
    followers.reported(report("b", 1))
    assert not followers.is_shared("node")
    assert [refused(followers, number) for number in (2, 2, 3, 4, 5)] == [True, False, False, False, False]
    assert followers.is_shared("node")
    clock.seconds += LEASE_SECONDS + 1
    followers.reported(report("b", 2))
    assert not followers.is_shared("node"), "the first one has ended"


def test_a_restart_with_a_report_on_the_way_is_no_second_host(followers: Followers) -> None:
    followers.reported(report("a", 1))
    followers.reported(report("b", 1))
    refused(followers, 2)
    assert not followers.is_shared("node")


def test_a_refusal_is_said_once_for_each_name_and_kind_and_again_after_ten_minutes(clock: Clock) -> None:
    reports = RefusedReports(clock)
    assert reports.is_to_be_said("one", "unauthorized")
    assert reports.is_to_be_said("one", "forbidden")
    clock.seconds += SAID_FOR_SECONDS - 1
    assert not reports.is_to_be_said("one", "unauthorized")
    clock.seconds += 1
    assert reports.is_to_be_said("one", "unauthorized")


def test_names_that_anybody_makes_up_fill_neither_memory_nor_log(clock: Clock) -> None:
    reports = RefusedReports(clock)
    said = [reports.is_to_be_said(f"made-up-{number}", "unauthorized") for number in range(2 * MOST_REFUSED)]
    assert sum(said) == MOST_REFUSED
    clock.seconds += SAID_FOR_SECONDS
    assert reports.is_to_be_said("another", "unauthorized")
