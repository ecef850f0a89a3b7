"""What a run says of itself: each fate of its newest version, with engines that are there, away, or none."""

from collections.abc import Sequence

import pytest

from refitd.explain.run import RunFacts, glance
from refitd.policy.goals import goals_of_run
from refitd.policy.strategy import Strategy
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import RunGlance
from support.records import engine, version

AT = "2026-11-21T12:00:00Z"
ONE = version(1, served_at=AT)
LOST = {"state": VersionState.LOST, "reason": "it is gone"}
SERVED_AND_LOST = version(2, served_at=AT, **LOST)
REJECTED = version(2, state=VersionState.REJECTED, reason="a torn file")
LEFT = version(2, served_at=AT, barred=True)

NEWEST_LOST = "Step 2 is LOST: it is gone; an engine that does not serve it "
FATES: dict[str, tuple[Sequence[VersionRecord], Standing, str, str | None]] = {
    # its versions: how the run stands with all engines there, what they serve, what is wrong
    "good": ([version(2, served_at=AT), ONE], Standing.CURRENT, "step 2, the newest.", None),
    "served and LOST": (
        [SERVED_AND_LOST, ONE],
        Standing.TROUBLED,
        "step 2, the newest, whose files are lost.",
        NEWEST_LOST + "is brought to run~v000001",
    ),
    "served and LOST, alone": (
        [SERVED_AND_LOST],
        Standing.TROUBLED,
        "step 2, the newest, whose files are lost.",
        NEWEST_LOST + "has nothing left to load",
    ),
    "served and LOST, as all before it": (
        [SERVED_AND_LOST, version(1, served_at=AT, **LOST)],
        Standing.TROUBLED,
        "step 2, the newest, whose files are lost.",
        NEWEST_LOST + "has nothing left to load",
    ),
    "LOST, and the next is being checked": (
        [version(3, state=VersionState.VALIDATING), SERVED_AND_LOST],
        Standing.TROUBLED,
        "step 2, whose files are lost.",
        NEWEST_LOST + "has nothing left to load",
    ),
    "LOST, and the next REJECTED": (
        [version(3, state=VersionState.REJECTED, reason="a NaN"), SERVED_AND_LOST],
        Standing.TROUBLED,
        "step 2, whose files are lost.",
        "Step 3 is REJECTED: a NaN",
    ),
    "LOST before it was served": (
        [version(2, **LOST), ONE],
        Standing.TROUBLED,
        "step 1.",
        "Step 2 is LOST: it is gone",
    ),
    "LOST before it was served, alone": ([version(2, **LOST)], Standing.TROUBLED, "", "Step 2 is LOST: it is gone"),
    "REJECTED": ([REJECTED, ONE], Standing.TROUBLED, "step 1.", "Step 2 is REJECTED: a torn file"),
    "REJECTED, alone": ([REJECTED], Standing.TROUBLED, "", "Step 2 is REJECTED: a torn file"),
    "REJECTED, and the next is being checked": (
        [version(3, state=VersionState.SETTLING), REJECTED, ONE],
        Standing.TROUBLED,
        "step 1.",
        "Step 2 is REJECTED: a torn file",
    ),
    "UNKNOWN": (
        [version(2, state=VersionState.UNKNOWN, reason="EIO"), ONE],
        Standing.TROUBLED,
        "step 1.",
        "Step 2 is UNKNOWN: EIO",
    ),
    "rolled back from": ([LEFT, ONE], Standing.ROLLED_BACK, "step 1.", None),
    "rolled back from, to one that is LOST since": (
        [LEFT, version(1, served_at=AT, **LOST)],
        Standing.TROUBLED,
        "step 1, whose files are lost.",
        "Step 1 is LOST: it is gone; an engine that does not serve it has nothing left to load",
    ),
    "rolled back from, alone": ([LEFT], Standing.TROUBLED, "", "Step 2 is barred: it was rolled back from"),
    "barred by its canary": (
        [version(2, barred=True, reason="the canary a broke"), ONE],
        Standing.TROUBLED,
        "step 1.",
        "Step 2 is barred: the canary a broke",
    ),
    "RETIRED": ([version(2, state=VersionState.RETIRED), ONE], Standing.CURRENT, "step 1, the newest.", None),
    "all are gone": (
        [],
        Standing.TROUBLED,
        "",
        "No version of this run is left, so its engines have nothing left to load: publish the next step",
    ),
}


def _seen(versions: Sequence[VersionRecord], engines: Sequence[EngineState]) -> RunGlance:
    goals = goals_of_run(Strategy(), None, versions, [])
    serving = None if goals.target is None else goals.target.id
    named = [engine(f"e{n}", serving=serving, state=state, reason=None) for n, state in enumerate(engines)]
    facts = RunFacts(
        run="run",
        target=goals.target,
        versions=versions,
        engines=named,
        update=None,
        strategy=Strategy(),
        loadable=goals.loadable,
        began=True,
    )
    return glance(facts)


@pytest.mark.parametrize("fate", FATES)
def test_engines_that_are_there_never_hide_what_became_of_the_newest_version(fate: str) -> None:
    versions, standing, serves, trouble = FATES[fate]
    found = _seen(versions, [EngineState.IN_SYNC])
    assert (found.standing, found.trouble) == (standing, trouble)
    assert found.headline == (f"The engine serves {serves}" if serves else _without_good(versions))


@pytest.mark.parametrize("fate", FATES)
def test_an_engine_that_is_away_is_trouble_and_hides_none(fate: str) -> None:
    versions, _, serves, trouble = FATES[fate]
    found = _seen(versions, [EngineState.IN_SYNC, EngineState.UNREACHABLE])
    assert (found.standing, found.trouble) == (Standing.TROUBLED, "e1 is UNREACHABLE")
    assert trouble is None or trouble in found.reasons
    assert found.headline == (f"1 of 2 engines serve {serves}" if serves else _without_good(versions))


@pytest.mark.parametrize("fate", FATES)
def test_a_run_without_engines_says_so_and_what_became_of_its_newest_version(fate: str) -> None:
    versions, _, serves, trouble = FATES[fate]
    found = _seen(versions, [])
    assert found.standing is Standing.UNFOLLOWED
    assert trouble is None or trouble in found.reasons
    assert found.headline.startswith("No engine follows this run" if serves else "No engine follows this run, and it")


def _without_good(versions: Sequence[VersionRecord]) -> str:
    had_good = not versions or versions[0].state is VersionState.LOST or versions[0].served_at is not None
    return "No good version left." if had_good else "No good version yet."
