"""Whom the hub names to followers that pull, as they report what others gave them."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from refitd.follow.relay_plans import SILENT_SECONDS, Answer, RelayPlans
from refitd.policy.relays import REFUSED_SECONDS
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
            wrong=dict.fromkeys(wrong, "bytes 0 to 99 of a file"),
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
    fault = "follower a at http://a:8700 gave follower b wrong bytes: bytes 0 to 99 of a file"
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


def test_a_follower_of_an_older_release_which_names_no_process_is_leased_and_is_nobodys_relay(hub: Hub) -> None:
    told = b'{"follower":"old","url":"http://old:8700","run":"run","holds":[],"pulls":["run~v000001"],"serves":null}'
    report = msgspec.json.decode(told, type=FollowerReport)
    hub.followers.reported(report)
    hub.plans.answer(report)
    for name in "abcd":
        hub.report(name, pulls=())
    assert list(hub.followers.pulled()) == [("old", V1)]
    assert all("old" not in each.parents for each in hub.plans.shown())
    assert hub.plans.serves("old", V1, 0.0)


def test_where_nobody_hands_on_nobody_is_named(tmp_path: Path) -> None:
    clock = Clock()
    followers = Followers(clock)
    store = Store(Journal(tmp_path), clock)
    alone = Hub(clock, store, followers, RelayPlans(followers, store, 0))
    alone.report("a")
    assert alone.report("b") == ()


def test_where_others_pull_what_is_new_one_that_has_said_nothing_gets_the_last_place(hub: Hub) -> None:
    for name in "abcd":
        hub.report(name)
    assert "a-1" in hub.named("b") | hub.named("c") | hub.named("d")
    v2 = ("run~v000002",)
    for name in "bcd":
        hub.report(name, pulls=v2)
    hub.report("d", pulls=v2, lost=("a-1",))
    places = {each.follower: each for each in hub.plans.shown()}
    assert places["a"].why_not is not None
    assert all("a" not in places[name].parents for name in "bcd")
    hub.report("a", pulls=v2)
    assert {each.follower: each.why_not for each in hub.plans.shown()}["a"] is None


def test_one_that_has_not_reported_for_half_a_lease_counts_as_silent_until_it_reports(hub: Hub) -> None:
    hub.report("a")
    hub.clock.seconds += SILENT_SECONDS
    hub.report("b")
    said = {each.follower: each.why_not for each in hub.plans.shown()}
    assert said == {"a": "it has not reported when it should have", "b": None}
    hub.report("a")
    assert [each.why_not for each in hub.plans.shown()] == [None, None]


def test_after_enough_copies_the_hub_gives_only_to_those_that_lack_a_relay_or_were_refused_for_long(hub: Hub) -> None:
    for name in "abcde":
        hub.report(name)
    lacking = {each.follower for each in hub.plans.shown() if None in each.parents}
    related = next(name for name in "abcde" if name not in lacking)
    assert lacking
    assert hub.plans.serves(related, V1, 1.9)
    assert all(hub.plans.serves(name, V1, 2.0) for name in (*lacking, "unknown"))
    assert not hub.plans.serves(related, V1, 2.0)
    hub.clock.seconds += REFUSED_SECONDS
    assert hub.plans.serves(related, V1, 2.0)
    assert not hub.plans.serves(related, "run~v000002", 2.0)
