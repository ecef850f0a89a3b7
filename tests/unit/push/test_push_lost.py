"""A version whose files the hub has lost is whole in the store: its followers go back only where the hub rolls back."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.reclaim.books import Books
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.bucket.pointer import Pointer
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState
from support.buckets import RUN, ScriptedBucket
from support.pushing import has, pushed


def id_of(step: int) -> str:
    return version_id(RUN, Order(1, step))


@contextmanager
def opened(folder: Path) -> Generator[Store]:
    """A process of the hub, which knows what the journal has of the one before."""
    with closing(Journal(folder / "state")) as journal:
        yield Store(journal, SystemClock())
        asyncio.run(written(journal))


async def written(journal: Journal) -> None:
    task = asyncio.create_task(journal.run())
    await journal.durable()
    task.cancel()
    await asyncio.wait({task})


def began(store: Store, root: Path, bucket: ScriptedBucket, *, served: bool = True) -> None:
    """Steps 1 to 3 are in the store, and 2 and 3 stay there."""
    for step in (1, 2, 3):
        has(store, root, step)
        known = store.versions[id_of(step)]
        store.put_version(known.having(served_at="then" if served or step < 3 else None))
        assert pushed(store, root, bucket).target == id_of(step)


def lost(store: Store, step: int) -> None:
    store.put_version(store.versions[id_of(step)].having(state=VersionState.LOST, reason="gone"))


def deleted(store: Store, step: int) -> None:
    """As collection does it."""
    retired(store, step)
    _books(store).deleted(store.versions[id_of(step)])


def retired(store: Store, step: int) -> None:
    """A collection that was killed."""
    _books(store).retire(store.versions[id_of(step)], "evidence for long enough")


def _books(store: Store) -> Books:
    return Books(store, Targets(store), DiskFiles(Path("unused")))


def is_on(pointer: Pointer, step: int) -> bool:
    """Whether followers are to serve a step, and nothing in the store is barred."""
    return pointer.target == id_of(step) and not any(version.barred for version in pointer.versions)


def barred(pointer: Pointer) -> list[int]:
    """The steps that are barred in the store."""
    return [version.order.step for version in pointer.versions if version.barred]


def ordered(store: Store, step: int) -> None:
    """The upstream of a host that follows wants a step, and it is good here."""
    store.put_order(replace(store.runs.record_of(RUN), ordered=id_of(step)), "ordered")


@pytest.mark.parametrize("then", [lambda store, step: None, retired, deleted])
@pytest.mark.parametrize("served", [True, False])
def test_followers_stay_on_a_version_whose_files_the_hub_has_lost_also_after_a_restart(
    tmp_path: Path, then: Callable[[Store, int], None], served: bool
) -> None:
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        began(store, root, bucket, served=served)
        lost(store, 3)
        assert is_on(pushed(store, root, bucket), 3)
        then(store, 3)
        assert is_on(pushed(store, root, bucket), 3)
        assert store.faults.push is None
    with opened(tmp_path) as store:
        assert id_of(3) in {*store.versions, *store.gone}
        assert is_on(pushed(store, root, bucket), 3)
        has(store, root, 4)
        assert is_on(pushed(store, root, bucket), 4)


@pytest.mark.parametrize("then", [lambda store, step: None, deleted])
def test_a_rollback_from_a_lost_version_takes_followers_back_and_its_deletion_does_not_bring_them_there_again(
    tmp_path: Path, then: Callable[[Store, int], None]
) -> None:
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        began(store, root, bucket)
        lost(store, 3)
        pushed(store, root, bucket)
        store.put_version(store.versions[id_of(3)].having(barred=True))
        then(store, 3)  # before the store was told of it
        assert barred(pushed(store, root, bucket)) == [3]
    with opened(tmp_path) as store:
        pointer = pushed(store, root, bucket)
        assert (pointer.target, barred(pointer)) == (id_of(2), [3])


def test_a_rollback_after_what_was_lost_is_deleted_takes_followers_back_from_it(tmp_path: Path) -> None:
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        began(store, root, bucket)
        lost(store, 3)
        deleted(store, 3)
        assert is_on(pushed(store, root, bucket), 3)
        left = store.index.deleted_lost[id_of(3)]
        store.put_version(left.having(barred=True))
        assert barred(pushed(store, root, bucket)) == [3]
    with opened(tmp_path) as store:
        pointer = pushed(store, root, bucket)
        assert (pointer.target, barred(pointer)) == (id_of(2), [3])


@pytest.mark.parametrize("then", [lambda store, step: None, deleted])
def test_followers_come_back_to_a_lost_version_that_was_served_where_the_next_one_is_given_up(
    tmp_path: Path, then: Callable[[Store, int], None]
) -> None:
    """Engines of the hub do."""
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        began(store, root, bucket)
        has(store, root, 4)
        pointer = pushed(store, root, bucket, keep=3)
        assert (pointer.target, [version.order.step for version in pointer.versions]) == (id_of(4), [4, 3, 2])
        lost(store, 3)
        then(store, 3)
        store.put_version(store.versions[id_of(4)].having(barred=True, given_up="no engine came through it"))
        pointer = pushed(store, root, bucket, keep=3)
        assert (pointer.target, barred(pointer)) == (id_of(3), [4])


@pytest.mark.parametrize("then", [lambda store, step: None, deleted])
def test_followers_do_not_go_on_to_a_version_that_was_lost_before_they_were_told_of_it(
    tmp_path: Path, then: Callable[[Store, int], None]
) -> None:
    """It was pushed in a pause, and no engine of the hub will ever serve it; nothing is wrong with it all the same."""
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        began(store, root, bucket)
        update = store.start_update(RUN, id_of(3), "newest good version")
        store.put_update(replace(update, paused_since="now"), "paused")
        has(store, root, 4)
        assert is_on(pushed(store, root, bucket), 3)
        lost(store, 4)
        then(store, 4)
        store.put_update(update, "resumed")
        assert is_on(pushed(store, root, bucket), 3)


def test_a_host_that_follows_and_pushes_on_keeps_its_followers_on_what_it_has_lost_until_its_upstream_goes_back(
    tmp_path: Path,
) -> None:
    bucket, root = ScriptedBucket(), tmp_path / "root"
    with opened(tmp_path) as store:
        for step in (1, 2, 3):
            has(store, root, step)
            store.put_version(store.versions[id_of(step)].having(served_at="then"))
            ordered(store, step)
            assert pushed(store, root, bucket, follows=True).target == id_of(step)
        lost(store, 3)
        assert is_on(pushed(store, root, bucket, follows=True), 3)
        deleted(store, 3)
        assert is_on(pushed(store, root, bucket, follows=True), 3)
        ordered(store, 2)  # the upstream bars step 3, of which no record is here any more
        pointer = pushed(store, root, bucket, follows=True)
        assert (pointer.target, barred(pointer)) == (id_of(2), [3])


def test_what_was_lost_and_deleted_and_is_pulled_again_is_deleted_no_more(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        has(store, tmp_path / "root", 1)
        good = store.versions[id_of(1)]
        lost(store, 1)
        deleted(store, 1)
        assert [version.id for version in store.index.lost_too_of(RUN)] == [good.id]
        store.put_version(good)
        assert store.index.lost_too_of(RUN) == [good]
        store.put_version(replace(good, state=VersionState.DELETED))
        assert store.index.lost_too_of(RUN) == []


def test_of_a_trainer_s_own_folders_that_are_lost_nothing_is_kept_when_they_are_deleted(tmp_path: Path) -> None:
    """A trainer deletes thousands, and none is ever pushed."""
    with opened(tmp_path) as store:
        has(store, tmp_path / "root", 1)
        store.put_version(store.versions[id_of(1)].having(owned=False))
        lost(store, 1)
        deleted(store, 1)
        assert store.index.lost_too_of(RUN) == []


def test_a_closed_run_is_not_opened_again_by_a_rollback_that_bars_what_was_lost_and_is_deleted(tmp_path: Path) -> None:
    """Also where a newer piece of evidence was deleted as well: it is no new version."""
    with opened(tmp_path) as store:
        for step in (1, 2, 3):
            has(store, tmp_path / "root", step)
        lost(store, 2)
        deleted(store, 2)
        lost(store, 3)
        deleted(store, 3)
        store.close_run(RUN)
        for left in store.index.lost_too_of(RUN)[:2]:
            store.put_version(left.having(barred=True))
        assert [version.barred for version in store.index.lost_too_of(RUN)] == [True, True, False]
        assert RUN in store.runs.closed
