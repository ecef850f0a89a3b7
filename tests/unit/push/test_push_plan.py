"""What is pushed: good versions alone, oldest first, from the newest full one on, with all that a delta stands on."""

from dataclasses import replace

import pytest

from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import CheckState, EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.bucket.pointer import BucketVersion, Pointer
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import Kind, VersionState
from refitd_hosts.push.plan import for_followers, left_behind, missing_there, to_push, wanted_there
from support.records import engine

RUN = "run"


def version(step: int, base: int | None = None, state: VersionState = VersionState.SEALED) -> VersionRecord:
    return VersionRecord(
        run=RUN,
        order=Order(1, step),
        path=f"run/v{step:06d}",
        state=state,
        created_at="2026-01-01T00:00:00Z",
        kind=Kind.FULL if base is None else Kind.DELTA,
        base=None if base is None else id_of(base),
    ).having(owned=True, digest=f"xxh3:{step}")


def id_of(step: int) -> str:
    return version_id(RUN, Order(1, step))


def steps(*versions: VersionRecord, newest: int | None = None, there: tuple[int, ...] = ()) -> list[int]:
    order = None if newest is None else Order(1, newest)
    return [each.order.step for each in to_push(versions, order, {id_of(step) for step in there})]


def test_a_chain_is_pushed_from_its_full_version_on() -> None:
    assert steps(version(3, 2), version(1), version(2, 1)) == [1, 2, 3]


def test_what_is_older_than_the_newest_full_version_is_skipped() -> None:
    assert steps(version(1), version(2, 1), version(3), version(4, 3)) == [3, 4]


def test_only_what_is_newer_than_what_counts_is_pushed() -> None:
    assert steps(version(1), version(2, 1), version(3, 2), newest=2, there=(1, 2)) == [3]


def test_a_delta_whose_base_is_missing_waits_and_so_does_what_stands_on_it() -> None:
    assert steps(version(3, 2), version(4, 3), newest=1, there=(1,)) == []


def test_versions_that_are_not_good_are_not_pushed() -> None:
    assert steps(version(1, state=VersionState.REJECTED), version(2, state=VersionState.VALIDATING)) == []


def test_versions_without_a_manifest_are_not_pushed() -> None:
    assert steps(version(1).having(owned=False)) == []


def test_a_barred_version_is_not_pushed() -> None:
    assert steps(version(1), version(2).having(barred=True)) == [1]


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
    barred = pointer(version(3).having(barred=True))
    assert wanted_there(barred, version(2), update, CANARY, HERE) == id_of(2)
    assert wanted_there(there, None, update, CANARY, HERE) is None


def test_what_is_wanted_here_and_is_not_in_the_store_is_said_with_what_to_do() -> None:
    there = pointer(version(9).having(barred=True), version(8), version(7))
    said = missing_there(there, version(2), ())
    assert said is not None
    assert said.startswith(
        f"followers of the store stay on what they have: engines here are to serve {id_of(2)}, which"
    )
    assert "Publish a newer step" in said
    assert "has no manifest" in (missing_there(there, version(2).having(owned=False, digest=None), ()) or "")
    assert missing_there(there, version(8).having(digest="another's"), ()) is not None


def test_what_a_rollback_has_left_is_known_though_it_is_deleted_here() -> None:
    """The store may have versions that the service keeps no more; those before the rollback's goal stay good."""
    there = pointer(version(9), version(8), version(5))
    assert left_behind(there, version(6), {id_of(8), id_of(5)}) == {id_of(8)}
    assert left_behind(there, version(9), {id_of(8), id_of(5)}) == set()
    assert left_behind(there, None, {id_of(8)}) == set()


LOST = version(3, state=VersionState.LOST).having(served_at="then")
TAKEN_AWAY = LOST.having(state=VersionState.DELETED, state_before=VersionState.LOST)


@pytest.mark.parametrize("lost", [LOST, TAKEN_AWAY])
def test_followers_may_stay_on_what_is_lost_here_alone(lost: VersionRecord) -> None:
    there = pointer(version(3), version(2))
    unserved = lost.having(served_at=None)
    assert for_followers(there, version(2), [lost, version(2)]) == lost
    assert for_followers(there, None, [lost]) == lost
    assert for_followers(there, version(4), [version(4), lost]) == version(4)
    assert for_followers(there, version(2), [unserved]) == unserved, "they were told to serve it"
    assert for_followers(pointer(version(3), version(2), desired=2), version(2), [unserved]) == version(2)


@pytest.mark.parametrize("lost", [LOST, TAKEN_AWAY])
def test_followers_go_back_from_what_is_lost_here_where_it_is_barred_or_not_in_the_store(lost: VersionRecord) -> None:
    there, left = pointer(version(3), version(2)), version(3).having(barred=True)
    assert for_followers(there, version(2), [lost.having(barred=True)]) == version(2)
    assert for_followers(there, version(2), [lost.having(digest="another's")]) == version(2)
    assert for_followers(there, version(2), [lost.having(digest=None)]) == version(2)
    assert for_followers(pointer(left, version(2)), version(2), [lost]) == version(2)
    assert for_followers(pointer(version(2)), version(2), [lost]) == version(2)
    assert for_followers(there, version(2), [lost.having(state_before=None, state=VersionState.REJECTED)]) == version(2)


def test_what_was_lost_before_it_was_deleted_here_is_left_by_a_rollback_alone() -> None:
    there, deleted = pointer(version(4), version(3), version(2)), {id_of(3), id_of(4)}
    assert left_behind(there, version(2), deleted, [TAKEN_AWAY]) == {id_of(4)}
    assert left_behind(there, version(2), deleted, [TAKEN_AWAY.having(barred=True)]) == deleted


def test_what_is_there_or_on_its_way_or_has_no_files_is_not_missing() -> None:
    there = pointer(version(8), version(7))
    assert missing_there(there, version(7), ()) is None
    assert missing_there(there, version(9), {id_of(9)}) is None
    assert missing_there(there, version(9).having(handed=True, state=VersionState.ANNOUNCED), ()) is None
    assert missing_there(there, None, ()) is None
