"""What a host that follows says of its upstream, and what of that makes it CURRENT, MOVING, PAUSED or TROUBLED."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.explain.run import RunFacts, glance
from refitd.policy.strategy import Strategy
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import RunGlance
from refitd_hosts.policy.upstream import UpstreamWord
from support.records import engine, version

HUB = "http://hub:8700"
ONE, TWO = version(1), version(2)


def said(here: int = 2, serving: int = 1, state: EngineState = EngineState.IN_SYNC, **fields: Any) -> RunGlance:
    """How the run stands: the newest version here, what the engine serves, and what is known of the upstream."""
    known: dict[str, Any] = {"name": HUB, "run": "run", "wanted": ONE.id}
    versions = [version(step) for step in range(here, 0, -1)]
    held = engine("a", serving=version(serving).id, state=state)
    word = UpstreamWord(**(known | fields))
    facts = RunFacts(
        run="run",
        target=version(serving),
        versions=versions,
        engines=[held],
        update=None,
        strategy=Strategy(),
        upstream=word,
    )
    return glance(facts)


@pytest.mark.parametrize("since", ["2026-01-01T00:00:00Z", ""])
def test_a_silent_upstream_is_trouble_and_what_it_said_last_is_not_repeated(since: str) -> None:
    found = said(here=1, silent_since=since, is_paused=True)
    when = f"since {since}" if since else "since this service started"
    why = f"Nothing was heard from {HUB} {when}: whether it has anything newer is not known here"
    assert (found.standing, found.reasons, found.trouble) == (Standing.TROUBLED, [why], why)
    assert found.headline == "The engine serves step 1."


def test_a_host_that_hears_its_upstream_and_has_the_newest_is_current() -> None:
    found = said(here=1)
    assert (found.standing, found.reasons, found.headline) == (
        Standing.CURRENT,
        [],
        "The engine serves step 1, the newest.",
    )


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ({"leads": True}, f"engines load it when {HUB} orders it, which may bring other hosts there first"),
        ({"elsewhere": ONE.id}, f"{HUB} wants {ONE.id} to be served"),
    ],
)
def test_a_host_with_a_newer_version_that_it_does_not_load_yet_says_what_it_waits_for(
    word: dict[str, Any], why: str
) -> None:
    found = said(**word)
    assert (found.standing, found.reasons) == (Standing.MOVING, [f"Step 2 is here and good: {why}"])
    assert said(wanted=TWO.id, **word).reasons == [], "it is about to load it"


def test_a_host_whose_upstream_has_paused_the_run_is_paused_once_it_is_where_it_may_go() -> None:
    why = f"{HUB} has paused the run: this host goes to nothing newer before it is resumed there"
    assert (said(is_paused=True).standing, said(is_paused=True).reasons) == (Standing.PAUSED, [why])
    assert said(is_paused=True, state=EngineState.UPDATING).standing is Standing.MOVING


def test_a_host_that_pulls_something_newer_is_not_current() -> None:
    found = said(here=1, pulling=TWO.id)
    assert (found.standing, found.reasons) == (Standing.MOVING, [f"Step 2 is pulled from {HUB}"])
    assert found.headline == "The engine serves step 1."
    assert said(here=2, serving=2, wanted=TWO.id, pulling=ONE.id).standing is Standing.CURRENT


def test_what_was_rolled_back_from_is_not_waited_for() -> None:
    word = UpstreamWord(name=HUB, run="run", leads=True)
    for newest in (version(2, barred=True), version(2, state=VersionState.REJECTED)):
        assert word.waits_for(ONE, newest) is None


def test_what_waits_on_a_host_for_its_own_pause_and_what_waits_for_its_hub_are_told_apart() -> None:
    def why(wanted: int, *, is_paused: bool, leads: bool = True) -> str | None:
        word = UpstreamWord(name=HUB, run="run", wanted=version(wanted).id, leads=leads)
        return word.waits_for(ONE, TWO, is_paused=is_paused)

    resumed = "Step 2 is here and good: engines load it when updates are resumed here (refitd resume run)"
    assert why(2, is_paused=True) == resumed
    assert why(2, is_paused=False) is None, "it is on its way"
    assert why(1, is_paused=True) == f"{resumed}, and {HUB} orders it then"
    assert why(1, is_paused=True, leads=False) == why(1, is_paused=False, leads=False) != resumed


def test_a_host_says_how_old_its_last_report_is_that_its_hub_has_taken() -> None:
    never = UpstreamWord(name=HUB, run="run")
    assert never.last_report(9.0) == [f"{HUB} has taken no report of this host since this service started."]
    assert replace(never, reported=5.2).last_report(9.0) == [f"{HUB} took the last report of this host 4 s ago."]
    assert replace(never, name="s3://bucket/run").last_report(9.0) == []
