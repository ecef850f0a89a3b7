"""What an upstream decides alone, so that a host that follows it refuses to."""

from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.explain.run import RunFacts, glance
from refitd.policy.strategy import Strategy
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd_client.contract.naming import Order
from refitd_hosts.follow.reporting import Hearing
from refitd_hosts.follow.upstream import UpstreamRun, UpstreamVersion
from refitd_hosts.policy.upstream import UpstreamWord, decided_by, decides_end, decides_pin, decides_run
from support.records import engine, version

HUB = "http://hub:8700"
ONE, TWO, OTHER = version(1), version(2), version(1, run="other")


def word(**fields: Any) -> UpstreamWord:
    return UpstreamWord(**({"name": HUB, "run": "run", "listed": frozenset({TWO.id})} | fields))


def test_an_upstream_decides_where_the_engines_of_the_run_that_is_followed_go_and_of_no_other() -> None:
    assert decides_run(word(has_ended=True), "run")
    assert decides_run(word(silent_since=""), "run")
    assert not decides_run(word(), "other")
    assert decides_run(None, "run"), "before the first look it may be any run"


def test_an_upstream_decides_when_the_run_ends_until_it_has_ended_there() -> None:
    assert decides_end(word(), "run")
    assert decides_end(None, "run")
    assert not decides_end(word(has_ended=True), "run")
    assert not decides_end(word(), "other")


def test_a_version_that_the_upstream_has_no_more_is_pinned_on_the_host_itself() -> None:
    assert decides_pin(word(), TWO)
    assert not decides_pin(word(), ONE)
    assert not decides_pin(word(listed=frozenset({OTHER.id})), OTHER)
    assert decides_pin(word(listed=None), ONE)
    assert decides_pin(None, ONE)


@pytest.mark.parametrize(
    ("offered", "is_heard", "has_ended", "listed"),
    [
        (None, False, False, None),
        (None, True, True, frozenset[str]()),
        (UpstreamRun(run="run", versions=(), is_closed=True), True, True, frozenset[str]()),
        (
            UpstreamRun(run="run", versions=(UpstreamVersion(id=TWO.id, run="run", order=Order(1, 2), digest="d"),)),
            True,
            False,
            frozenset({TWO.id}),
        ),
    ],
)
def test_what_the_upstream_has_said_last_says_whether_the_run_has_ended_and_what_it_has(
    tmp_path: Any, offered: UpstreamRun | None, is_heard: bool, has_ended: bool, listed: frozenset[str] | None
) -> None:
    store = Store(Journal(tmp_path), SystemClock())
    store.journal.close()
    hearing = Hearing(store.clock)
    if is_heard:
        hearing.answered()
    said = hearing.word(HUB, "run", offered, leads=True, wanted=None, pulling=None, disobeyed=None)
    assert (said.has_ended, said.listed) == (has_ended, listed)


def test_a_refusal_names_the_upstream_and_for_a_store_who_can_do_it() -> None:
    assert decided_by(HUB, "roll run x back") == f"this service follows {HUB}: roll run x back there"
    assert decided_by("s3://bucket/p", "pin v") == (
        "this service follows s3://bucket/p: pin v at the service that pushes into it (refitd serve --push)"
    )


def test_a_run_that_the_host_does_not_follow_is_not_said_to_want_its_engines() -> None:
    held = engine("a", run="run")
    facts: dict[str, Any] = {"run": "mine", "target": None, "versions": [version(1, run="mine")], "engines": []}
    found = glance(
        RunFacts(**facts, update=None, strategy=Strategy(), others=[held], elsewhere=word().not_brought("mine"))
    )
    assert found.reasons == [
        f"This service follows {HUB}, which decides where engines go: none is brought to mine here. Publish it there; "
        "'refitd runs close mine' says here that it has ended"
    ]
