"""The sentence that answers "are the engines on the newest version, and if not, why not"."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.explain.run import RunFacts, glance
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord, UpdateRecord
from refitd_client.contract.states import EngineState, Standing, VersionState
from support.records import engine, version

HERE = [engine("a", serving="run~v000002"), engine("b", serving="run~v000002")]
UPDATE = UpdateRecord(number=1, run="run", version="run~v000002", cause="", started_at="")


def seen(engines: list[EngineRecord], **fields: Any) -> RunFacts:
    versions = [version(2), version(1)]
    defaults: dict[str, Any] = {"target": versions[0], "versions": versions, "update": UPDATE}
    return RunFacts(run="run", engines=engines, **({"strategy": Strategy()} | defaults | fields))


@pytest.mark.parametrize(
    ("state", "standing"),
    [
        (EngineState.UPDATING, Standing.MOVING),
        (EngineState.VERIFYING, Standing.MOVING),
        (EngineState.PROBING, Standing.MOVING),
        (EngineState.UNREACHABLE, Standing.TROUBLED),
        (EngineState.NACKED, Standing.TROUBLED),
        (EngineState.TAINTED, Standing.TROUBLED),
        (EngineState.QUARANTINED, Standing.TROUBLED),
        (EngineState.CONTESTED, Standing.TROUBLED),
    ],
)
def test_an_engine_that_is_not_there_is_named_with_its_state_and_reason(state: EngineState, standing: Standing) -> None:
    late = engine("late", serving="run~v000001", state=state, reason="so it is")
    found = glance(seen([*HERE, late]))
    assert (found.standing, found.headline) == (standing, "2 of 3 engines serve step 2, the newest.")
    assert found.reasons == [f"late is {state}: so it is"]


def test_an_engine_that_another_writer_has_changed_lately_is_trouble_though_it_is_there_again() -> None:
    fought = engine("a", serving=HERE[0].serving, contests=2)
    found = glance(seen([fought]))
    assert (found.standing, found.in_sync) == (Standing.TROUBLED, 1)
    assert found.reasons == [
        "a is loaded again where another writer had changed the weights: stop the other writer (another refitd with "
        "this engine, or a trainer or a script that updates it); this is said for 300 probe intervals after the last "
        "change, 10 minutes unless --probe-interval is set; 'refitd explain a'"
    ]


def test_a_host_that_once_served_something_else_by_itself_is_not_another_writers() -> None:
    was = engine("a", serving=HERE[0].serving, contests=2, pulls=True)
    assert glance(seen([was])).standing is Standing.CURRENT


def test_a_run_that_is_troubled_says_why_in_one_sentence_and_no_other_does() -> None:
    bad = version(3, state=VersionState.REJECTED, reason="a torn file")
    away = engine("late", serving="run~v000001", state=EngineState.UNREACHABLE, reason="timed out")
    assert glance(seen(HERE, versions=[bad, version(2)])).trouble == "Step 3 is REJECTED: a torn file"
    assert glance(seen([*HERE, away], versions=[bad, version(2)])).trouble == "late is UNREACHABLE: timed out"
    assert glance(seen(HERE)).trouble is None
    assert glance(seen([], versions=[bad, version(2)])).trouble is None, "it is UNFOLLOWED"


def test_two_hundred_engines_in_one_state_are_one_sentence() -> None:
    away = [engine(f"gpu-{i:03d}", state=EngineState.UNREACHABLE, reason="timed out") for i in range(200)]
    assert glance(seen(away)).reasons == ["gpu-000, gpu-001, gpu-002 and 197 more are UNREACHABLE: timed out"]


@pytest.mark.parametrize(
    ("newest", "standing", "says"),
    [
        (
            version(3, state=VersionState.REJECTED, reason="a torn file"),
            Standing.TROUBLED,
            "Step 3 is REJECTED: a",
        ),
        (
            version(3, barred=True),
            Standing.ROLLED_BACK,
            "Rolled back to step 2: newer versions, up to step 3, are barred",
        ),
        (
            version(3, state=VersionState.REJECTED, reason="a torn file", barred=True),
            Standing.ROLLED_BACK,
            "Rolled back to step 2: newer versions, up to step 3, are barred (step 3 is REJECTED)",
        ),
        (
            version(3, barred=True, reason="the canary a broke"),
            Standing.TROUBLED,
            "Step 3 is barred: the canary a broke",
        ),
        (version(3, state=VersionState.UNKNOWN, reason="EIO"), Standing.TROUBLED, "Step 3 is UNKNOWN: EIO"),
        (version(3, state=VersionState.VALIDATING), Standing.MOVING, "Step 3 is VALIDATING"),
    ],
)
def test_a_newer_version_that_engines_do_not_go_to_is_the_reason(newest: Any, standing: Standing, says: str) -> None:
    found = glance(seen(HERE, versions=[newest, version(2)]))
    assert (found.standing, found.headline) == (standing, "All 2 engines serve step 2.")
    assert found.reasons[0].startswith(says)
    assert found.newest == "run~v000003"


@pytest.mark.parametrize(
    ("fields", "standing", "says"),
    [
        (
            {"state": VersionState.ANNOUNCED},
            Standing.CURRENT,
            "Step 2 was handed over from its trainer's memory: its files are to follow",
        ),
        ({"state": VersionState.VALIDATING}, Standing.CURRENT, "Step 2 is VALIDATING"),
        (
            {"state": VersionState.REJECTED, "reason": "its files will not come: no space left"},
            Standing.TROUBLED,
            "Step 2 is served from memory alone: its files will not come: no space left",
        ),
    ],
)
def test_a_version_that_is_served_and_has_no_files_says_so(
    fields: dict[str, Any], standing: Standing, says: str
) -> None:
    newest = version(2, handed=True, **fields)
    found = glance(seen(HERE, target=newest, versions=[newest, version(1)]))
    assert (found.standing, found.reasons) == (standing, [says])


def test_a_version_that_was_in_memory_alone_and_that_no_engine_has_any_more_is_trouble() -> None:
    policy = {"durable": "never"}
    gone = version(3, state=VersionState.ANNOUNCED, handed=True, metadata=policy, served_at="2026-11-21T12:00:00Z")
    found = glance(seen(HERE, versions=[gone, version(2)]))
    says = "Step 3 was in memory alone (durable=never), and no engine has it any more"
    assert (found.standing, found.reasons) == (Standing.TROUBLED, [says])
    held = glance(seen([each.having(serving=gone.id) for each in HERE], target=gone, versions=[gone, version(2)]))
    assert held.standing is Standing.CURRENT


def test_what_was_collected_is_not_the_newest() -> None:
    found = glance(seen(HERE, versions=[version(3, state=VersionState.RETIRED), version(2)]))
    assert (found.standing, found.newest) == (Standing.CURRENT, "run~v000002")


def test_a_rollback_is_under_way_until_every_engine_has_come_back_and_trouble_stays_trouble() -> None:
    left = {"versions": [version(3, barred=True), version(2)]}
    late = engine("late", serving="run~v000003", state=EngineState.UPDATING)
    assert glance(seen([*HERE, late], **left)).standing is Standing.MOVING
    away = engine("late", serving="run~v000003", state=EngineState.UNREACHABLE)
    assert glance(seen([*HERE, away], **left)).standing is Standing.TROUBLED
    paused = replace(UPDATE, paused_since="2026-11-21T12:00:00Z")
    assert glance(seen(HERE, update=paused, **left)).standing is Standing.ROLLED_BACK
    assert glance(seen(HERE, target=None, **left)).standing is Standing.TROUBLED


def test_what_was_rolled_back_to_while_updates_are_paused_promises_no_update() -> None:
    left = {"versions": [version(3, barred=True), version(2)]}
    assert glance(seen(HERE, **left)).reasons[0].endswith(". What is published next is loaded as usual")
    paused = replace(UPDATE, paused_since="2026-11-21T12:00:00Z")
    assert glance(seen(HERE, update=paused, **left)).reasons == [
        "Rolled back to step 2: newer versions, up to step 3, are barred",
        "Updates of this run are paused: no engine goes to a newer version before they are resumed",
    ]


def test_where_generations_differ_steps_are_named_with_them() -> None:
    left = version(1, generation=2, barred=True)
    found = glance(seen(HERE, versions=[left, version(2)]))
    assert found.headline == "All 2 engines serve step 2 of generation 1."
    assert found.reasons == [
        "Rolled back to step 2 of generation 1: newer versions, up to step 1 of generation 2, are barred. "
        "What is published next is loaded as usual"
    ]
    torn = version(3, generation=2, state=VersionState.REJECTED, reason="a torn file")
    assert glance(seen(HERE, versions=[torn, version(2)])).trouble == "Step 3 of generation 2 is REJECTED: a torn file"
    comes = version(1, generation=2, state=VersionState.VALIDATING)
    assert glance(seen(HERE, versions=[comes, version(2)])).reasons == ["Step 1 of generation 2 is VALIDATING"]


def test_a_rollback_stays_said_when_what_was_published_after_it_is_rejected() -> None:
    torn = version(4, state=VersionState.REJECTED, reason="a torn file")
    found = glance(seen(HERE, versions=[torn, version(3, barred=True), version(2)]))
    assert (found.standing, found.newest) == (Standing.TROUBLED, "run~v000004")
    assert found.reasons == [
        "Step 4 is REJECTED: a torn file",
        "Rolled back to step 2: newer versions, up to step 3, are barred. What is published next is loaded as usual",
    ]
    behind = glance(seen(HERE, target=version(4), versions=[version(4), version(3, barred=True), version(2)]))
    assert behind.reasons == []  # the way forward has been gone


def test_paused_updates_are_said_and_are_no_trouble() -> None:
    behind = [engine("a", serving="run~v000001", state=EngineState.BEHIND)]
    found = glance(seen(behind, update=replace(UPDATE, paused_since="2026-11-21T12:00:00Z")))
    assert found.standing is Standing.PAUSED
    assert found.paused_since == "2026-11-21T12:00:00Z"
    assert "paused" in found.reasons[0]


def test_an_engine_that_waits_for_its_turn_says_for_whom() -> None:
    engines = [
        engine("a", serving="run~v000001", state=EngineState.UPDATING),
        engine("b", serving="run~v000001", state=EngineState.BEHIND),
    ]
    found = glance(seen(engines, strategy=Strategy(name=StrategyName.ROLLING)))
    assert found.reasons[-1] == "b is next: at most 1 may be out of service, and a (UPDATING) are first"


def test_a_run_without_a_good_version_or_without_engines_says_that() -> None:
    assert glance(seen(HERE, target=None, versions=[])).headline == "No version yet."
    assert glance(seen(HERE, target=None)).headline == "No good version yet."
    assert glance(seen([])).headline == "No engine follows this run; step 2 is its target."
    assert glance(seen([], target=None)).headline == "No engine follows this run, and it has no good version yet."
    assert (
        glance(seen([], target=None, versions=[])).headline == "No engine follows this run, and it has no version yet."
    )


@pytest.mark.parametrize("state", [VersionState.UNKNOWN, VersionState.REJECTED, VersionState.LOST])
def test_a_run_that_no_engine_follows_is_unfollowed_whatever_its_newest_version_is(state: VersionState) -> None:
    found = glance(seen([], target=None, versions=[version(3, state=state, reason="so it is")], others=HERE))
    assert found.standing is Standing.UNFOLLOWED
    assert "'refitd engines move a --run run --yes'" in found.reasons[0]
    assert found.reasons[1] == f"Step 3 is {state}: so it is"


def test_a_run_says_that_its_newest_version_is_read_again() -> None:
    doubted = version(2, in_doubt=True)
    found = glance(seen(HERE, target=doubted, versions=[doubted]))
    assert any("they are read again" in reason for reason in found.reasons)
    assert found.trouble is None
