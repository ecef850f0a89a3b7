"""What is pushed: good versions alone, oldest first, from the newest full one on, with all that a delta stands on."""

from dataclasses import replace

from refitd.push.plan import to_push
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import Kind, VersionState

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
        owned=True,
        digest=f"xxh3:{step}",
    )


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
    assert steps(replace(version(1), owned=False)) == []


def test_a_barred_version_is_not_pushed() -> None:
    assert steps(version(1), replace(version(2), barred=True)) == [1]
