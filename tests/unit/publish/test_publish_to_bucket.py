"""A publisher whose root is an object store: its versions count there, in full and as deltas, or it says why not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import version_prefix
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind
from refitd_client.errors import BucketError, RunBusyError
from refitd_client.publish.options import DeltaRules
from support.buckets import NAME, RUN, KilledError, ScriptedBucket, counted, keys, nth, unreachable
from support.checkpoints import tensors
from support.inside import in_process

V1, V2, V3 = (f"exp~trial~v00000{step}" for step in (1, 2, 3))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedBucket:
    """The bucket that `s3://bucket/prefix` names, and a local folder of this test for it."""
    made = ScriptedBucket(MemoryStore())
    monkeypatch.setattr(Bucket, "at", lambda url: made)
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "spool"))
    return made


def changed(seed: int) -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
    """A large tensor of which each seed has changed one element."""
    weight = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    weight[0, :seed] += 1.0
    return {"weight": weight}


def test_what_is_published_counts_and_leaves_no_local_files(bucket: ScriptedBucket, tmp_path: Path) -> None:
    with WeightPublisher(NAME, RUN) as publisher:
        publication = publisher.publish(tensors(), step=1)
    assert counted(bucket) == [V1]
    assert publication.url == f"{NAME}/exp~trial/versions/v000001"
    assert publication.timings["upload"] > 0
    assert [path for path in (tmp_path / "spool").rglob("*") if path.name.startswith("model")] == []


def test_a_delta_leads_from_the_version_before(bucket: ScriptedBucket) -> None:
    with WeightPublisher(NAME, RUN) as publisher:
        first = publisher.publish(changed(0), step=1, transport="delta")
        second = publisher.publish(changed(1), step=2, transport="delta")
        third = publisher.publish(changed(2), step=3, transport="delta")
    assert (first.kind, second.kind, third.kind) == (Kind.FULL, Kind.DELTA, Kind.DELTA)
    assert third.base == V2
    assert counted(bucket) == [V3, V2, V1]
    assert third.bytes < first.bytes / 10


def test_a_full_version_ends_the_chain_and_what_is_older_is_retired(bucket: ScriptedBucket) -> None:
    with WeightPublisher(
        NAME, RUN, options=PublishOptions(keep=1, delta_rules=DeltaRules(anchor_every=2))
    ) as publisher:
        for step in (1, 2, 3):
            publisher.publish(changed(step), step=step, transport="delta")
    assert counted(bucket) == [V3]


def test_a_failed_upload_is_no_version_and_the_next_one_is_full(bucket: ScriptedBucket) -> None:
    with WeightPublisher(NAME, RUN) as publisher:
        publisher.publish(changed(0), step=1, transport="delta")
        bucket.before = nth(0, unreachable(), ("write_over",))
        with pytest.raises(BucketError):
            publisher.publish(changed(1), step=2, transport="delta")
        assert counted(bucket) == [V1]
        third = publisher.publish(changed(2), step=3, transport="delta")
    assert third.kind is Kind.FULL
    assert counted(bucket) == [V3, V1]


def test_a_restarted_trainer_goes_on_after_what_counts(
    bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPublisher(NAME, RUN) as publisher:
        publisher.publish(tensors(), step=7)
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "another host"))
    with WeightPublisher(NAME, RUN) as publisher:
        assert publisher.publish(tensors(), step=8).generation == 1
    with WeightPublisher(NAME, RUN) as publisher:
        assert publisher.publish(tensors(), step=3).generation == 2


def test_a_step_whose_upload_was_killed_begins_a_generation(
    bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.before = nth(2, KilledError(), ("write",))
    with pytest.raises(KilledError), WeightPublisher(NAME, RUN) as publisher:
        publisher.publish(tensors(), step=1)
    bucket.before = lambda method, key: None
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "another host"))
    with WeightPublisher(NAME, RUN) as publisher:
        assert publisher.publish(tensors(), step=1).generation == 2
    assert counted(bucket) == [f"{V1}.g2"]
    assert any(key.startswith(version_prefix(RUN, Order(1, 1))) for key in keys(bucket))


def test_what_a_killed_publisher_left_on_this_host_is_removed(bucket: ScriptedBucket, tmp_path: Path) -> None:
    with WeightPublisher(NAME, RUN) as publisher:
        left = in_process(publisher)._folder.path / "v000004"
        other = in_process(publisher)._folder.path / "notes"
    for folder in (left, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    with WeightPublisher(NAME, RUN):
        assert not left.exists()
        assert other.exists()


def test_of_two_publishers_on_two_hosts_one_loses(
    bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPublisher(NAME, RUN) as first:
        first.publish(tensors(), step=1)
        monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "another host"))
        with WeightPublisher(NAME, RUN) as second:
            second.publish(tensors(), step=2)
        with pytest.raises(RunBusyError, match="held by another publisher"):
            first.publish(tensors(), step=3)
    assert counted(bucket) == [V2, V1]


def test_old_versions_are_collected_by_the_publisher(bucket: ScriptedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_client.bucket.target._COLLECT_EVERY", 0.0)
    with WeightPublisher(NAME, RUN, options=PublishOptions(keep=1)) as publisher:
        for step in (1, 2):
            publisher.publish(tensors(step), step=step)
        bucket.later = 1e6
        publisher.publish(tensors(3), step=3)
        target = in_process(publisher)._context.target
        assert target is not None
        assert target._collection is not None
        target._do(_ended(target._collection))
    assert not any(key.startswith(version_prefix(RUN, Order(1, 1))) for key in keys(bucket))


async def _ended(task: "asyncio.Task[None]") -> None:
    await asyncio.wait([task])


def test_a_store_goes_without_a_service(bucket: ScriptedBucket) -> None:
    with pytest.raises(ValueError, match="goes without service_url"):
        WeightPublisher(NAME, RUN, "http://127.0.0.1:8700")


def test_what_a_notice_alone_says_is_refused(bucket: ScriptedBucket) -> None:
    with WeightPublisher(NAME, RUN) as publisher, pytest.raises(ValueError, match="go to a service with the notice"):
        publisher.publish(tensors(), step=1, allow_extra=True)


def test_a_store_that_is_not_there_is_said_at_once_and_the_run_is_free_again(bucket: ScriptedBucket) -> None:
    bucket.before = nth(0, unreachable(), ("write_new",))
    with pytest.raises(BucketError, match="could not be reached"):
        WeightPublisher(NAME, RUN)
    WeightPublisher(NAME, RUN).close()


def test_a_local_folder_of_another_user_is_refused(
    bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd_client.errors import StorageError

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="not a folder of this user"):
        WeightPublisher(NAME, RUN)
