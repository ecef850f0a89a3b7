"""Nothing is collected from a bucket that is leased, not proved to be the run's, or seen by a listing that failed."""

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from refitd_client.bucket.collection import BucketCollection, collect
from refitd_client.bucket.pointer import (
    FOLLOWERS_PREFIX,
    LEASE_SECONDS,
    MAX_LEASE_SECONDS,
    UPLOAD_SECONDS,
    FollowerNote,
    version_prefix,
)
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.naming import Order
from refitd_client.errors import BucketError, RunBusyError
from support.buckets import RUN, KilledError, ScriptedBucket, collected, counted, keys, nth, publish_folder, unreachable
from support.checkpoints import publish, tensors

V1, V2, V3 = (f"exp~trial~v00000{step}" for step in (1, 2, 3))


def of_version(bucket: ScriptedBucket, step: int) -> set[str]:
    return {key for key in keys(bucket) if key.startswith(version_prefix(RUN, Order(1, step)))}


@pytest.fixture
def bucket() -> ScriptedBucket:
    return ScriptedBucket()


@pytest.fixture
def run(bucket: ScriptedBucket, tmp_path: Path) -> BucketRun:
    """A run of three versions, of which the first is retired."""
    run: BucketRun | None = None
    for step in (1, 2, 3):
        run = publish_folder(bucket, publish(tmp_path, RUN, step, tensors(step)), run=run)
    assert run is not None
    return run


def note(bucket: ScriptedBucket, *pulls: str) -> None:
    data = msgspec.json.encode(FollowerNote(follower="f", pulls=pulls))
    asyncio.run(bucket.write(f"{FOLLOWERS_PREFIX}f.json", data))


def test_a_retired_version_is_deleted_when_it_has_rested(bucket: ScriptedBucket, run: BucketRun) -> None:
    assert collected(run) == BucketCollection(waiting=(V1,))
    bucket.later = LEASE_SECONDS + 1
    assert collected(run).deleted == (V1,)
    assert of_version(bucket, 1) == set()
    assert counted(bucket) == [V3, V2]
    assert of_version(bucket, 2)
    assert collected(run) == BucketCollection()  # and it is off the list


def test_a_version_that_a_follower_pulls_stays_and_goes_after_its_lease(bucket: ScriptedBucket, run: BucketRun) -> None:
    bucket.later = LEASE_SECONDS - 10  # it began to pull right before the rest is over
    note(bucket, V1)
    before = of_version(bucket, 1)
    bucket.later = 2 * LEASE_SECONDS - 20
    assert collected(run).deleted == ()
    assert of_version(bucket, 1) == before
    bucket.later = 2 * LEASE_SECONDS + 1
    assert collected(run).deleted == (V1,)


def test_leases_are_measured_by_the_stores_clock(
    bucket: ScriptedBucket, run: BucketRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (0.0, 4e9):  # this host's clock stands at 1970, or in the next century
        monkeypatch.setattr("time.time", lambda wrong=wrong: wrong)
        assert collected(run).deleted == ()
    bucket.later = LEASE_SECONDS + 1
    assert collected(run).deleted == (V1,)


def test_a_note_that_cannot_be_read_keeps_everything_for_the_longest_lease(
    bucket: ScriptedBucket, run: BucketRun
) -> None:
    asyncio.run(bucket.write(f"{FOLLOWERS_PREFIX}f.json", b"?"))
    bucket.later = MAX_LEASE_SECONDS - 10
    assert collected(run).deleted == ()
    bucket.later = MAX_LEASE_SECONDS + 10
    assert collected(run).deleted == (V1,)


@pytest.mark.parametrize("method", ["list", "read", "facts"])
def test_nothing_is_deleted_after_a_look_that_failed(bucket: ScriptedBucket, run: BucketRun, method: str) -> None:
    note(bucket)
    bucket.later = LEASE_SECONDS + 1
    before = keys(bucket)
    bucket.before = nth(0, unreachable(), (method,))
    with pytest.raises(BucketError):
        collected(run)
    assert before <= keys(bucket)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(6))
def test_a_collection_that_is_killed_at_any_deletion_is_finished_by_the_next(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path, at: int, when: str
) -> None:
    bucket.later = LEASE_SECONDS + 1
    setattr(bucket, when, nth(at, KilledError(), ("delete", "write_over")))
    with pytest.raises(KilledError):
        collected(run)
    healthy = bucket.sibling()
    other = publish_folder(healthy, publish(tmp_path, RUN, 4, tensors(4)))  # the next publisher of the run
    collected(other)
    assert of_version(healthy, 1) == set()
    assert len(of_version(healthy, 3)) > 3


@pytest.mark.parametrize("at", range(14))
def test_a_store_that_is_not_there_at_any_request_of_a_collection_loses_nothing_that_counts(
    bucket: ScriptedBucket, run: BucketRun, at: int
) -> None:
    bucket.later = LEASE_SECONDS + 1
    bucket.before = nth(at, unreachable(), ("write", "write_over", "delete", "read", "facts", "list"))
    with suppress(BucketError):
        collected(run)
    bucket.before = lambda method, key: None
    assert counted(bucket) == [V3, V2]
    assert len(of_version(bucket, 2)) == len(of_version(bucket, 3)) > 3
    collected(run)  # the same publisher goes on
    assert of_version(bucket, 1) == set()


def test_an_object_that_no_manifest_names_stays(bucket: ScriptedBucket, run: BucketRun) -> None:
    foreign = {version_prefix(RUN, Order(1, 1)) + "mine.txt", "exp~trial/versions/notes/mine.txt"}
    for key in foreign:
        asyncio.run(bucket.write(key, b"mine"))
    bucket.later = UPLOAD_SECONDS + 1
    assert collected(run).deleted == (V1,)
    assert foreign <= keys(bucket)


@pytest.mark.parametrize("manifest", [b"{", None])
def test_a_version_whose_manifest_is_not_the_published_one_stays(
    bucket: ScriptedBucket, run: BucketRun, manifest: bytes | None
) -> None:
    key = version_prefix(RUN, Order(1, 1)) + "refit.json"
    if manifest is None:
        found = asyncio.run(bucket.read(version_prefix(RUN, Order(1, 2)) + "refit.json", 2**20))
        assert found is not None
        manifest = found.data
    asyncio.run(bucket.write(key, manifest))
    before = of_version(bucket, 1)
    bucket.later = LEASE_SECONDS + 1
    done = collected(run)
    assert done.deleted == ()
    assert "manifest" in done.kept[V1]
    assert of_version(bucket, 1) == before


def test_an_upload_that_can_never_count_is_deleted_by_its_own_list(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    bucket.before = nth(2, KilledError(), ("write",))
    with pytest.raises(KilledError):
        publish_folder(bucket, publish(tmp_path, RUN, 4, tensors(4)), run=run)
    healthy = bucket.sibling()
    assert of_version(healthy, 4)
    healthy.later = UPLOAD_SECONDS + 1
    collected(publish_folder(healthy, publish(tmp_path, RUN, 5, tensors(5))))
    assert of_version(healthy, 4) == set()


def test_an_upload_that_may_still_count_stays(bucket: ScriptedBucket, run: BucketRun, tmp_path: Path) -> None:
    bucket.before = nth(2, KilledError(), ("write",))
    with pytest.raises(KilledError):
        publish_folder(bucket, publish(tmp_path, RUN, 4, tensors(4)), run=run)
    bucket.later = 10 * UPLOAD_SECONDS
    before = of_version(bucket, 4)
    collected(run)
    assert before <= of_version(bucket, 4)  # writes that were under way at the kill may arrive later


def test_a_publisher_that_has_lost_the_run_collects_nothing(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    publish_folder(bucket.sibling(), publish(tmp_path, RUN, 4, tensors(4)))
    bucket.later = LEASE_SECONDS + 1
    with pytest.raises(RunBusyError):
        asyncio.run(collect(run))
    assert of_version(bucket, 1)
