"""Whom the hub names to followers that pull, as they report what others gave them."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from refitd.follow.relay_plans import Answer, RelayPlans
from refitd.state.followers import LEASE_SECONDS, Followers
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd_client.contract.follow import FollowerReport

V1 = "run~v000001"


class Clock:
    """Stands still unless a test moves it."""

    seconds = 0.0

    def now(self) -> str:
        return "2026-01-01T00:00:00Z"

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class Hub:
    clock: Clock
    store: Store
    followers: Followers
    plans: RelayPlans

    def report(
        self,
        name: str,
        *,
        process: str = "",
        url: str | None = "",
        wrong: tuple[str, ...] = (),
        lost: tuple[str, ...] = (),
        pulls: tuple[str, ...] = (V1,),
    ) -> Answer:
        """A follower reports, a second after the last report; whom it is told to pull from."""
        self.clock.seconds += 1
        report = FollowerReport(
            follower=name,
            process=process or f"{name}-1",
            url=f"http://{name}:8700" if url == "" else url,
            run="run",
            pulls=pulls,
            wrong=dict.fromkeys(wrong, "block 0 of a file"),
            lost=lost,
        )
        self.followers.reported(report)
        return self.plans.answer(report).get(V1, ())

    def named(self, name: str) -> set[str]:
        """The processes that a follower is told to pull from."""
        return {relay.process for relay in self.report(name) if relay is not None}


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    clock = Clock()
    followers = Followers(clock)
    store = Store(Journal(tmp_path), clock)
    return Hub(clock, store, followers, RelayPlans(followers, store, 2))


def test_one_alone_pulls_from_the_hub_and_two_exchange_halves(hub: Hub) -> None:
    assert hub.report("a") == ()
    first = hub.report("b")
    assert [relay and relay.url for relay in first] == ["http://a:8700", None]
    assert [relay and relay.url for relay in hub.report("a")] == [None, "http://b:8700"]


def test_a_relay_that_gave_wrong_bytes_is_named_to_nobody_until_its_process_is_another(hub: Hub) -> None:
    hub.report("a")
    assert hub.named("b") == {"a-1"}
    hub.report("b", wrong=("a-1",))
    fault = "follower a at http://a:8700 gave follower b wrong bytes: block 0 of a file"
    assert hub.store.faults.relays == fault
    assert hub.plans.shown()[0].why_not == fault
    hub.report("a")
    assert hub.named("b") == set()
    assert "a-1" not in hub.named("c")
    hub.report("a", process="a-2")
    assert hub.store.faults.relays is None
    assert "a-2" in hub.named("b") | hub.named("c") | hub.named("d")


def test_a_relay_that_gave_nothing_is_not_named_again_until_it_has_reported(hub: Hub) -> None:
    hub.report("a")
    assert hub.named("b") == {"a-1"}
    assert hub.report("b", lost=("a-1",)) == ()
    assert "a-1" not in hub.named("c")
    hub.report("a")
    assert hub.report("b", lost=("a-1",)) == () or "a-1" not in {r.process for r in hub.report("b", lost=("a-1",)) if r}
    assert "a-1" in hub.named("d") | hub.named("e")


def test_one_whose_lease_has_ended_is_not_named(hub: Hub) -> None:
    hub.report("a")
    assert hub.named("b") == {"a-1"}
    hub.clock.seconds += LEASE_SECONDS - 1
    hub.report("b")
    hub.clock.seconds += 3
    assert hub.named("b") == set()
    assert [each.follower for each in hub.plans.shown()] == ["b"]


def test_one_that_others_cannot_reach_pulls_from_others_and_is_not_named(hub: Hub) -> None:
    hub.report("a", url=None)
    assert hub.named("b") == set()
    assert {relay and relay.process for relay in hub.report("a", url=None)} == {"b-1"}


def test_where_nobody_hands_on_nobody_is_named(tmp_path: Path) -> None:
    clock = Clock()
    followers = Followers(clock)
    store = Store(Journal(tmp_path), clock)
    alone = Hub(clock, store, followers, RelayPlans(followers, store, 0))
    alone.report("a")
    assert alone.report("b") == ()
