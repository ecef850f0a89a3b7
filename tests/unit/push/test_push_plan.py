"""What is pushed: good versions alone, oldest first, from the newest full one on, with all that a delta stands on."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import CheckState, EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.bucket.pointer import BucketVersion, Pointer
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import Kind, VersionState
from refitd_hosts.push.plan import for_followers, left_behind, missing_there, to_push, wanted_there, without_files
from support.records import engine
from support.records import version as any_version

RUN = "run"


def version(step: int, base: int | None = None, **fields: Any) -> VersionRecord:
    made = any_version(step, **{"owned": True, "digest": f"xxh3:{step}"} | fields)
    return made if base is None else replace(made, kind=Kind.DELTA, base=id_of(base))


def id_of(step: int) -> str:
    return version_id(RUN, Order(1, step))


@pytest.mark.parametrize(
    ("versions", "there", "steps"),
    [
        ([version(3, 2), version(1), version(2, 1)], (), [1, 2, 3]),
        ([version(1), version(2, 1), version(3), version(4, 3)], (), [3, 4]),  # what is older than the newest full one
        ([version(1), version(2, 1), version(3, 2)], (1, 2), [3]),
        ([version(3, 2), version(4, 3)], (1,), []),  # the base is missing
        ([version(1, state=VersionState.REJECTED), version(2, state=VersionState.VALIDATING)], (), []),
        ([version(1, owned=False)], (), []),  # it has no manifest
        ([version(1), version(2, barred=True)], (), [1]),
    ],
)
def test_good_versions_are_pushed_oldest_first_from_the_newest_full_one_on(
    versions: list[VersionRecord], there: tuple[int, ...], steps: list[int]
) -> None:
    newest = Order(1, max(there)) if there else None
    assert [each.order.step for each in to_push(versions, newest, {id_of(step) for step in there})] == steps


def pointer(*versions: VersionRecord, desired: int | None = None) -> Pointer:
    named = tuple(BucketVersion(id=each.id, digest=each.digest or "", barred=each.barred) for each in versions)
    return Pointer(run=RUN, writer="w", versions=named, desired=None if desired is None else id_of(desired))


CANARY = Strategy(name=StrategyName.CANARY)
HERE = [engine()]
BEGUN = UpdateRecord(number=1, run=RUN, version=id_of(2), cause="newest", started_at="")
PASSED = replace(BEGUN, check=CheckState.PASSED)
PAUSED = replace(BEGUN, paused_since="now")


@pytest.mark.parametrize(
    ("update", "strategy", "engines", "step"),
    [
        (BEGUN, Strategy(), HERE, 2),
        (None, Strategy(), HERE, 2),
        (PAUSED, Strategy(), HERE, 1),
        (PAUSED, Strategy(), [], 1),
        (BEGUN, CANARY, HERE, 1),
        (None, CANARY, HERE, 1),
        (PASSED, CANARY, HERE, 2),
        (replace(PASSED, version=id_of(1)), CANARY, HERE, 1),  # the check of the version before
        (None, CANARY, [], 2),  # there is none to check it
    ],
)
def test_a_newer_version_waits_for_a_pause_here_and_for_the_check_of_a_canary_here(
    update: UpdateRecord | None, strategy: Strategy, engines: list[EngineRecord], step: int
) -> None:
    there = pointer(version(2), version(1), desired=1)
    assert wanted_there(there, version(2), update, strategy, engines) == id_of(step)


@pytest.mark.parametrize("update", [PAUSED, BEGUN])
def test_the_way_back_waits_for_nothing(update: UpdateRecord) -> None:
    there = pointer(version(3), version(2), version(1))
    assert wanted_there(there, version(2), update, CANARY, HERE) == id_of(2)
    assert wanted_there(pointer(version(3, barred=True)), version(2), update, CANARY, HERE) == id_of(2)
    assert wanted_there(there, None, update, CANARY, HERE) is None


def test_what_is_wanted_here_and_is_not_in_the_store_nor_on_its_way_is_said_with_what_to_do() -> None:
    there = pointer(version(9, barred=True), version(8), version(7))
    said = missing_there(there, version(2), ()) or ""
    assert said.startswith(
        f"followers of the store stay on what they have: engines here are to serve {id_of(2)}, which"
    )
    assert "Publish a newer step" in said
    assert "has no manifest" in (missing_there(there, version(2, owned=False, digest=None), ()) or "")
    assert missing_there(there, version(8, digest="another's"), ()) is not None
    in_memory = version(9, handed=True, state=VersionState.ANNOUNCED)
    for wanted, waiting in ((version(7), ()), (version(9), {id_of(9)}), (in_memory, ()), (None, ())):
        assert missing_there(there, wanted, waiting) is None


LOST = version(3, state=VersionState.LOST, served_at="then")
TAKEN_AWAY = LOST.having(state=VersionState.DELETED, state_before=VersionState.LOST)


@pytest.mark.parametrize("lost", [LOST, TAKEN_AWAY])
def test_followers_go_back_from_what_is_lost_here_where_it_is_barred_or_not_in_the_store(lost: VersionRecord) -> None:
    there, left = pointer(version(3), version(2)), version(3, barred=True)
    assert for_followers(there, version(2), [lost]) == lost
    for other in ({"barred": True}, {"digest": "another's"}, {"digest": None}):
        assert for_followers(there, version(2), [lost.having(**other)]) == version(2)
    assert for_followers(pointer(left, version(2)), version(2), [lost]) == version(2)
    assert for_followers(pointer(version(2)), version(2), [lost]) == version(2)
    assert for_followers(there, version(2), [lost.having(state_before=None, state=VersionState.REJECTED)]) == version(2)


def test_what_a_rollback_has_left_is_known_though_it_is_deleted_here() -> None:
    """The store may have versions that the service keeps no more; those before the rollback's goal stay good, and so
    does what was lost before it was deleted and is not barred.
    """
    there = pointer(version(9), version(8), version(5))
    assert left_behind(there, version(6), {id_of(8), id_of(5)}) == {id_of(8)}
    assert left_behind(there, version(9), {id_of(8), id_of(5)}) == left_behind(there, None, {id_of(8)}) == set()
    there, deleted = pointer(version(4), version(3), version(2)), {id_of(3), id_of(4)}
    assert left_behind(there, version(2), deleted, [TAKEN_AWAY]) == {id_of(4)}
    assert left_behind(there, version(2), deleted, [TAKEN_AWAY.having(barred=True)]) == deleted


WANTED_NONE: dict[str, Any] = {"state": VersionState.ANNOUNCED, "handed": True, "metadata": {"durable": "never"}}


@pytest.mark.parametrize(
    ("fields", "is_said"),
    [
        (WANTED_NONE, True),
        (WANTED_NONE | {"metadata": {}}, False),  # its files are to follow
        (WANTED_NONE | {"state": VersionState.SEALED}, False),  # it got some, since an engine did not take it
        (WANTED_NONE | {"state": VersionState.REJECTED}, False),
        ({"metadata": {"durable": "never"}}, False),  # a trainer's own word, of a version in files
    ],
)
def test_it_is_the_newest_of_the_run_if_its_trainer_wants_no_files(fields: dict[str, Any], is_said: bool) -> None:
    newest = version(2, **fields)
    assert without_files([version(1, **WANTED_NONE), newest]) == (newest if is_said else None)
    assert without_files([]) is None
