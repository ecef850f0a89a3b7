"""A hub lets so many hosts pull from it at a time, in its order; it keeps no place for a host that says nothing."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from refitd_client.contract.follow import Following
from refitd_hosts.hub.engine import SILENT_SECONDS
from refitd_hosts.hub.reported import PLACE_BYTES, PLACE_SECONDS, PLACES, PullTurns, places_for

HUB, STORE = "http://hub:8700", "s3://bucket/prefix"
LARGE = 16 * 2**30


@dataclass
class Clock:
    seconds: float = 1000.0

    def now(self) -> str:
        return ""

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class Hub:
    """Its turns, at a time that a test moves."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.turns = PullTurns(self.clock)

    def hears(
        self, name: str, version: str | None = "v1", *, is_needed: bool = True, size: int = LARGE, **told: Any
    ) -> int:
        """How many are before a host by the reply to its report: that it waits, unless `told` says otherwise."""
        more: dict[str, Any] = {"ahead": 0} | told
        following = Following(follower=name, upstream=HUB, upstreams=[HUB], pulling=version, **more)
        return self.turns.reported(following, is_needed=is_needed, size=size).ahead

    def pulls(self, name: str, **more: Any) -> int:
        return self.hears(name, ahead=None, source=HUB, **more)

    def ends(self, name: str) -> None:
        self.hears(name, None, ahead=None)

    def passes(self, seconds: float, *heard: str) -> None:
        """Time goes by, in which these hosts report that they pull."""
        ends = self.clock.seconds + seconds
        while self.clock.seconds < ends:
            self.clock.seconds += 1.0
            for name in heard:
                self.pulls(name)


@pytest.fixture
def full() -> Hub:
    """All places are taken, by hosts that pull."""
    hub = Hub()
    for number in range(PLACES):
        assert hub.hears(f"first{number}") == 0
        assert hub.pulls(f"first{number}") == 0
    return hub


def test_so_many_hosts_pull_at_a_time_and_the_next_ones_in_the_order_in_which_they_came(full: Hub) -> None:
    for number in range(3):
        full.passes(1.0, *(f"first{each}" for each in range(PLACES)))
        assert full.hears(f"next{number}") == PLACES + number
    full.ends("first0")
    assert full.hears("next1") == PLACES
    assert full.hears("next0") == 0
    assert full.hears("next0") == 0  # it has not heard that
    assert full.hears("next1") == PLACES
    full.ends("first1")
    assert full.hears("next1") == 0


def test_a_host_that_lacks_what_it_is_to_serve_comes_before_those_that_pull_ahead(full: Hub) -> None:
    assert full.hears("ahead", is_needed=False) == PLACES
    full.passes(1.0, *(f"first{each}" for each in range(PLACES)))
    assert full.hears("canary") == PLACES
    assert full.hears("ahead", is_needed=False) == PLACES + 1
    full.ends("first0")
    assert full.hears("ahead", is_needed=False) == PLACES
    assert full.hears("canary") == 0


def test_a_host_that_dies_while_it_pulls_or_waits_holds_up_no_other(full: Hub) -> None:
    assert full.hears("dies") == PLACES
    full.passes(1.0, *(f"first{each}" for each in range(PLACES)))
    assert full.hears("waits") == PLACES + 1
    full.passes(SILENT_SECONDS + 2, *(f"first{each}" for each in range(1, PLACES)))
    assert full.hears("waits") == 0


def test_after_a_restart_of_the_hub_hosts_that_pull_hold_their_places(full: Hub) -> None:
    again = Hub()
    for number in range(PLACES):
        assert again.pulls(f"first{number}") == 0
    assert again.hears("waits") == PLACES


def test_a_place_counts_for_so_long_that_hosts_that_keep_theirs_hold_no_other_up_for_ever(full: Hub) -> None:
    liars = [f"first{each}" for each in range(PLACES)]
    full.passes(PLACE_SECONDS - 5, *liars)
    assert full.hears("waits") == PLACES
    full.passes(10, *liars)
    assert full.hears("waits") == 0


def test_a_host_that_pulls_from_a_store_holds_no_place_and_one_that_leaves_the_store_waits_again(full: Hub) -> None:
    full.ends("first0")
    assert full.hears("stores") == 0
    assert full.hears("stores", ahead=None, source=STORE) == 0
    assert full.hears("other") == 0
    assert full.hears("stores") == PLACES


def test_a_host_keeps_its_place_for_all_that_it_needs_and_not_for_what_it_pulls_ahead(full: Hub) -> None:
    assert full.hears("waits") == PLACES
    full.passes(1.0, *(f"first{each}" for each in range(PLACES)))
    assert full.hears("first0", "v2") == 0
    assert full.hears("first0", "v3", is_needed=False) == PLACES
    assert full.hears("waits") == 0


def test_a_newer_version_costs_a_host_that_waits_nothing(full: Hub) -> None:
    assert full.hears("waits") == PLACES
    full.passes(1.0, *(f"first{each}" for each in range(PLACES)))
    assert full.hears("later") == PLACES + 1
    full.ends("waits")
    assert full.hears("waits", "v2") == PLACES


def test_of_small_versions_more_hosts_pull_at_a_time(full: Hub) -> None:
    small = PLACE_BYTES // 100
    assert places_for(small) == 100
    assert places_for(None) == places_for(LARGE) == PLACES
    assert [full.hears(f"small{each}", size=small) for each in range(97)] == [0] * 96 + [100]
