"""A hub that comes again pushes on, unless another publisher has its run by then."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal
from refitd.state.records import UpdateRecord
from refitd.state.store import Store
from refitd_client.bucket.pointer import BucketVersion, advanced
from refitd_client.contract.naming import Order
from refitd_client.contract.states import VersionState
from refitd_hosts.push.pusher import _as_here
from support.buckets import RUN, ScriptedBucket, counted, publish_folder
from support.checkpoints import publish, tensors
from support.pushing import has, pushed


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    journal = Journal(tmp_path / "state")
    yield Store(journal, SystemClock())
    journal.close()


def test_a_hub_that_comes_again_goes_on_with_its_run(store: Store, tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    has(store, tmp_path / "root", 1)
    first = pushed(store, tmp_path / "root", bucket)
    again = pushed(store, tmp_path / "root", bucket)  # there is nothing new, and it collects
    assert again.versions == first.versions
    assert again.writer != first.writer
    has(store, tmp_path / "root", 2)
    assert [version.order for version in pushed(store, tmp_path / "root", bucket).versions] == [
        Order(1, 2),
        Order(1, 1),
    ]
    assert store.faults.push is None


def test_a_hub_that_comes_again_leaves_its_run_to_another_publisher_without_a_newer_version_and_says_so(
    store: Store, tmp_path: Path
) -> None:
    bucket = ScriptedBucket()
    has(store, tmp_path / "root", 1)
    pushed(store, tmp_path / "root", bucket)
    trainer = publish_folder(bucket.sibling(), publish(tmp_path / "elsewhere", RUN, 2, tensors(2)))
    pointer = pushed(store, tmp_path / "root", bucket)
    assert pointer == trainer.pointer
    assert pointer.target == "exp~trial~v000002"
    assert "has exp~trial~v000002, which is not from here" in (store.faults.push or "")
    publish_folder(bucket.sibling(), publish(tmp_path / "elsewhere", RUN, 3, tensors(3)), run=trainer)
    has(store, tmp_path / "root", 4)  # with a newer version it takes the run, as any publisher
    assert pushed(store, tmp_path / "root", bucket).target == "exp~trial~v000004"
    assert store.faults.push is None


def test_a_hub_that_takes_a_run_says_nothing_of_another_publisher_s_version_with_the_id_of_one_of_its_own(
    store: Store, tmp_path: Path
) -> None:
    bucket = ScriptedBucket()
    publish_folder(bucket, publish(tmp_path / "elsewhere", RUN, 1, tensors(9)))
    for step in (1, 2):
        has(store, tmp_path / "root", step)
    own = store.versions["exp~trial~v000001"]
    store.put_version(own.having(pinned=True, barred=True))
    pointer = pushed(store, tmp_path / "root", bucket)
    assert [(version.id, version.pinned, version.barred) for version in pointer.versions] == [
        ("exp~trial~v000002", False, False),
        ("exp~trial~v000001", False, False),
    ]
    assert _as_here(store.versions, own.id)(pointer).target == "exp~trial~v000002"  # nor is it wanted


def test_a_hub_that_wants_what_the_store_does_not_have_any_more_says_so_until_it_wants_something_else(
    store: Store, tmp_path: Path
) -> None:
    """It keeps more versions than the store, and rolls back to one of these: followers of the store cannot."""
    bucket = ScriptedBucket()
    for step in (1, 2, 3):
        has(store, tmp_path / "root", step)
        pushed(store, tmp_path / "root", bucket)
    assert counted(bucket) == ["exp~trial~v000003", "exp~trial~v000002"]
    for step in (2, 3):
        store.put_version(store.versions[f"exp~trial~v{step:06d}"].having(barred=True))
    assert pushed(store, tmp_path / "root", bucket).target is None
    assert "engines here are to serve exp~trial~v000001, which is not in the store any more" in (
        store.faults.push or ""
    )
    has(store, tmp_path / "root", 4)
    assert pushed(store, tmp_path / "root", bucket).target == "exp~trial~v000004"
    assert store.faults.push is None


def test_versions_that_are_pushed_in_a_pause_are_wanted_when_it_ends(store: Store, tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    has(store, tmp_path / "root", 1)
    pushed(store, tmp_path / "root", bucket)
    update = UpdateRecord(number=1, run=RUN, version="exp~trial~v000001", cause="newest", started_at="")
    store.put_update(replace(update, paused_since="now"), "paused")
    has(store, tmp_path / "root", 2)
    pointer = pushed(store, tmp_path / "root", bucket)
    assert (pointer.newest, pointer.target) == (Order(1, 2), "exp~trial~v000001")
    store.put_update(update, "goes on")
    assert pushed(store, tmp_path / "root", bucket).target == "exp~trial~v000002"


def test_followers_do_not_go_to_what_a_rollback_has_left_and_the_hub_has_deleted(store: Store, tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    for step in (1, 2, 3):
        has(store, tmp_path / "root", step)
        pushed(store, tmp_path / "root", bucket)
    store.put_version(replace(store.versions["exp~trial~v000002"], state=VersionState.DELETED))
    store.put_version(store.versions["exp~trial~v000003"].having(barred=True))
    pointer = pushed(store, tmp_path / "root", bucket)
    assert {each.id: each.barred for each in pointer.versions} == {"exp~trial~v000003": True, "exp~trial~v000002": True}
    assert pointer.target is None


def test_where_all_in_the_store_is_barred_the_next_version_waits_there_as_long_as_here(
    store: Store, tmp_path: Path
) -> None:
    bucket, root = ScriptedBucket(), tmp_path / "root"
    for step in (1, 2, 3):
        has(store, root, step)
        pushed(store, root, bucket)
    for step in (2, 3):  # a rollback to step 1, which the store has no more
        store.put_version(store.versions[f"exp~trial~v{step:06d}"].having(barred=True))
    assert pushed(store, root, bucket).target is None
    first = store.start_update(RUN, "exp~trial~v000001", "rolled back")
    store.put_update(replace(first, paused_since="now"), "paused")
    has(store, root, 4)
    pointer = pushed(store, root, bucket)
    assert pointer.newest == Order(1, 4)
    assert pointer.target is None, "followers stay"
    store.put_update(first, "resumed")
    assert pushed(store, root, bucket).target == "exp~trial~v000004"


def test_the_end_of_a_run_is_said_in_the_store_and_a_new_version_takes_it_back(store: Store, tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    has(store, tmp_path / "root", 1)
    assert not pushed(store, tmp_path / "root", bucket).is_closed
    store.close_run(RUN)
    closed = pushed(store, tmp_path / "root", bucket)
    assert closed.is_closed
    newer = BucketVersion(id="exp~trial~v000002", digest="xxh3:2")
    assert not advanced(closed, newer, writer="a trainer", keep=2, now=0.0).is_closed
