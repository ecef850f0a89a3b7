"""Anybody may collect from a run, which stays its publisher's. Nothing goes that is leased, not proved to be the run's,
or that a look which failed did not see.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from refitd_client.bucket.collection import BucketCollection, collect, collect_run
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import (
    FOLLOWERS_PREFIX,
    LEASE_SECONDS,
    UPLOAD_SECONDS,
    BucketLease,
    BucketVersion,
    FollowerNote,
    Pointer,
    collectable,
    kept,
    lease_of,
    parse_pointer,
    pointer_key,
    version_prefix,
    why_waiting,
)
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order
from refitd_client.contract.states import Kind
from refitd_client.errors import BucketError, RunBusyError
from support.buckets import RUN, KilledError, ScriptedBucket, counted, keys, nth, publish_folder, unreachable
from support.buckets import collected as collected_by
from support.checkpoints import publish, tensors

V1, V2, V3, V4 = (f"exp~trial~v00000{step}" for step in (1, 2, 3, 4))


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


def collected(bucket: Bucket, keep: int | None = None, *, dry: bool = False) -> BucketCollection:
    return asyncio.run(collect_run(bucket, RUN, keep=keep, dry=dry))


def beside(bucket: ScriptedBucket, act: Callable[[ScriptedBucket], object]) -> None:
    """Act as another process does, in the middle of a request of this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(act, bucket.sibling()).result()


def once(methods: Sequence[str], act: Callable[[], object]) -> Callable[[str, str], None]:
    left = [1]

    def hook(method: str, key: str) -> None:
        if method in methods and key == pointer_key(RUN) and left[0]:
            left[0] -= 1
            act()

    return hook


def of_version(bucket: Bucket, step: int) -> set[str]:
    return {key for key in keys(bucket) if key.startswith(version_prefix(RUN, Order(1, step)))}


def require_whole(bucket: Bucket) -> None:
    """Every version that counts has its manifest, and every file of it."""
    for version in counted(bucket):
        prefix = version_prefix(RUN, Order(1, int(version[-6:])))
        manifest = asyncio.run(Bucket.read(bucket, prefix + MANIFEST_NAME, 2**20))
        assert manifest is not None
        assert {prefix + name for name in parse_manifest(manifest.data).files} <= keys(bucket)


def pointer_of(bucket: Bucket) -> Pointer:
    found = asyncio.run(Bucket.read(bucket, pointer_key(RUN), 2**20))
    assert found is not None
    return parse_pointer(found.data, RUN)


def test_a_run_whose_publisher_is_gone_is_collected_and_stays_that_publishers(
    bucket: ScriptedBucket, run: BucketRun
) -> None:
    assert collected(bucket) == BucketCollection(waiting=(V1,))
    bucket.later = LEASE_SECONDS + 1
    assert collected(bucket) == BucketCollection(deleted=(V1,))
    assert of_version(bucket, 1) == set()
    assert counted(bucket) == [V3, V2]
    assert pointer_of(bucket).writer == run.writer
    assert collected(bucket) == BucketCollection()


def test_what_would_go_is_said_without_deleting_or_retiring(bucket: ScriptedBucket, run: BucketRun) -> None:
    bucket.later = LEASE_SECONDS + 1
    before, pointer = keys(bucket), pointer_of(bucket)
    assert collected(bucket, 1, dry=True) == BucketCollection(deleted=(V1,), retired=(V2,))
    assert keys(bucket) - before <= {"exp~trial/collected.json"}
    assert pointer_of(bucket) == pointer


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collection_in_the_middle_of_a_publication_takes_nothing_from_either(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path, when: str
) -> None:
    """Right before the pointer is moved, and right after, when the answer to that is lost as well."""
    bucket.later = LEASE_SECONDS + 1

    def meanwhile() -> None:
        beside(bucket, collected)
        if when == "after":
            raise unreachable()

    setattr(bucket, when, once(("write_over",), meanwhile))
    publish_folder(bucket, publish(tmp_path, RUN, 4, tensors(4)), run=run)
    assert counted(bucket) == [V4, V3]
    assert of_version(bucket, 1) == set()
    require_whole(bucket)


def test_what_a_publisher_writes_after_its_upload_was_collected_goes_with_a_later_collection(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    """It was stopped for an hour before it wrote the manifest, and another one has published meanwhile."""
    old, newer = (publish(tmp_path / name, RUN, step, tensors(step)) for name, step in (("old", 4), ("new", 5)))

    def in_place_of_it(other: ScriptedBucket) -> None:
        publish_folder(other, newer)
        other.later = 3700.0
        collected(other)

    def hours_later(method: str, key: str) -> None:
        if method == "write" and key == version_prefix(RUN, Order(1, 4)) + MANIFEST_NAME:
            bucket.before = lambda method, key: None
            beside(bucket, in_place_of_it)
            assert of_version(bucket, 4) == set()
            bucket.later = 3700.0

    bucket.before = hours_later
    with pytest.raises(RunBusyError):
        publish_folder(bucket, old, run=run)
    assert of_version(bucket, 4) != set()
    bucket.later = 2 * 3700.0
    assert id_of(4) in collected(bucket).deleted
    assert of_version(bucket, 4) == set()
    require_whole(bucket)


def test_a_publisher_that_comes_during_a_collection_has_the_run(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    bucket.later = LEASE_SECONDS + 1
    newer = publish(tmp_path, RUN, 4, tensors(4))
    bucket.before = once(("write_over",), lambda: beside(bucket, lambda other: publish_folder(other, newer)))
    assert collected(bucket).deleted == (V1,)
    assert counted(bucket) == [V4, V3]
    assert pointer_of(bucket).writer != run.writer


def test_two_collections_at_once_delete_the_same(bucket: ScriptedBucket, run: BucketRun) -> None:
    bucket.later = LEASE_SECONDS + 1
    bucket.before = once(("write_over",), lambda: beside(bucket, collected))
    collected(bucket)
    assert of_version(bucket, 1) == set()
    assert counted(bucket) == [V3, V2]
    require_whole(bucket)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(9))
def test_a_collection_killed_at_any_write_leaves_what_counts_whole_and_is_finished_by_the_next(
    bucket: ScriptedBucket, run: BucketRun, at: int, when: str
) -> None:
    bucket.later = LEASE_SECONDS + 1
    setattr(bucket, when, nth(at, KilledError(), ("delete", "write_over", "write")))
    with suppress(KilledError):
        collected(bucket, 1)
    healthy = bucket.sibling()
    assert counted(healthy) in ([V3, V2], [V3])
    require_whole(healthy)
    for later in (3, 6):
        healthy.later = later * LEASE_SECONDS
        collected(healthy, 1)
    assert counted(healthy) == [V3]
    assert of_version(healthy, 1) == of_version(healthy, 2) == set()


@pytest.mark.parametrize("name", ["pulls", "serves"])
def test_what_a_followers_note_names_stays_with_all_that_it_stands_on(name: str) -> None:
    chain = (version(5), version(4, 3), version(3, 2), version(2), version(1))
    pointer = kept(Pointer(run=RUN, writer="w", versions=chain), keep=1, now=0.0)
    assert [each.id[-1] for each in pointer.retired] == ["4", "3", "2", "1"]
    named = FollowerNote(follower="f", **{name: id_of(4) if name == "serves" else (id_of(4),)})
    lease = lease_of(msgspec.json.encode(named), written=LEASE_SECONDS)
    due = collectable(pointer, [lease], LEASE_SECONDS + 1)
    assert [each.id for each in due] == [id_of(1)]
    assert len(collectable(pointer, [BucketLease(versions=None, ends=9e9)], LEASE_SECONDS + 1)) == 0
    assert len(collectable(pointer, [lease], 3 * LEASE_SECONDS)) == 4, "when the lease is over"


def test_a_copy_that_a_follower_merely_holds_needs_nothing_of_the_store(bucket: ScriptedBucket, run: BucketRun) -> None:
    bucket.later = LEASE_SECONDS + 1
    note = FollowerNote(follower="f", holds=(V1,), serves=V2)
    asyncio.run(bucket.write(f"{FOLLOWERS_PREFIX}f.json", msgspec.json.encode(note)))
    assert collected(bucket).deleted == (V1,)


def test_each_version_that_stays_has_its_reason(bucket: ScriptedBucket, run: BucketRun) -> None:
    told = collected(bucket, 1, dry=True).why
    assert told[V1].startswith("it was retired less than ten minutes ago")
    assert told[V2].startswith("it was retired less than ten minutes ago")
    assert told[V3] == collected(bucket, dry=True).why[V2] == "it counts"
    bucket.later = LEASE_SECONDS + 1
    note = FollowerNote(follower="host-1", serves=V1)
    asyncio.run(bucket.write(f"{FOLLOWERS_PREFIX}host-1.json", msgspec.json.encode(note)))
    done = collected(bucket, 1)
    assert (done.waiting, done.retired) == ((V1,), (V2,))
    assert done.why[V1].startswith("a lease of follower host-1 until 2")
    assert done.why[V1].endswith("Z: the follower pulls or serves it")
    bucket.later = 3 * LEASE_SECONDS
    assert set(collected(bucket).deleted) == {V1, V2}


def test_a_base_is_kept_for_its_delta_and_a_note_that_cannot_be_read_for_every_version() -> None:
    newest, pinned = version(5, 4), replace(version(2), pinned=True)
    chain = (newest, version(4), version(3, 2), pinned, version(1))
    pointer = kept(Pointer(run=RUN, writer="w", versions=chain), keep=1, now=0.0)
    assert [each.id for each in pointer.versions] == [id_of(5), id_of(4), id_of(2)]
    retired = kept(Pointer(run=RUN, writer="w", versions=(version(6), *chain[:2])), keep=1, now=0.0)
    lease = lease_of(msgspec.json.encode(FollowerNote(follower="f", pulls=(id_of(5),))), LEASE_SECONDS)
    of_delta = "a lease of follower f until 1970-01-01T00:20:00Z: the follower pulls or serves"
    assert why_waiting(retired, [lease], LEASE_SECONDS + 1) == {
        id_of(5): f"{of_delta} it",
        id_of(4): f"{of_delta} a delta that needs it",
    }
    broken = lease_of(b"{", LEASE_SECONDS, "followers/x.json")
    told = why_waiting(retired, [broken], LEASE_SECONDS + 1)
    assert set(told) == {id_of(5), id_of(4)}
    assert "the note followers/x.json cannot be read" in told[id_of(4)]


def test_an_upload_that_was_broken_off_waits_for_its_hour(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    bucket.before = nth(3, KilledError(), ("write", "write_new", "multipart"))
    with suppress(KilledError):
        publish_folder(bucket, publish(tmp_path / "old", RUN, 4, tensors(4)), run=run)
    healthy = bucket.sibling()
    publish_folder(healthy, publish(tmp_path / "new", RUN, 5, tensors(5)))
    assert of_version(healthy, 4) != set()
    assert V4 not in collected(healthy).deleted
    healthy.later = 3700.0
    assert V4 in collected(healthy).deleted


def note(bucket: ScriptedBucket, *pulls: str) -> None:
    data = msgspec.json.encode(FollowerNote(follower="f", pulls=pulls))
    asyncio.run(bucket.write(f"{FOLLOWERS_PREFIX}f.json", data))


def test_a_version_that_a_follower_pulls_stays_and_goes_after_its_lease(bucket: ScriptedBucket, run: BucketRun) -> None:
    bucket.later = LEASE_SECONDS - 10  # it began to pull right before the rest is over
    note(bucket, V1)
    before = of_version(bucket, 1)
    bucket.later = 2 * LEASE_SECONDS - 20
    assert collected_by(run).deleted == ()
    assert of_version(bucket, 1) == before
    bucket.later = 2 * LEASE_SECONDS + 1
    assert collected_by(run).deleted == (V1,)


def test_leases_are_measured_by_the_stores_clock(
    bucket: ScriptedBucket, run: BucketRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (0.0, 4e9):  # this host's clock stands at 1970, or in the next century
        monkeypatch.setattr("time.time", lambda wrong=wrong: wrong)
        assert collected_by(run).deleted == ()
    bucket.later = LEASE_SECONDS + 1
    assert collected_by(run).deleted == (V1,)


@pytest.mark.parametrize("method", ["list", "read", "facts"])
def test_nothing_is_deleted_after_a_look_that_failed(bucket: ScriptedBucket, run: BucketRun, method: str) -> None:
    note(bucket)
    bucket.later = LEASE_SECONDS + 1
    before = keys(bucket)
    bucket.before = nth(0, unreachable(), (method,))
    with pytest.raises(BucketError):
        collected_by(run)
    assert before <= keys(bucket)


@pytest.mark.parametrize("at", range(14))
def test_a_store_that_is_not_there_at_any_request_of_a_collection_loses_nothing_that_counts(
    bucket: ScriptedBucket, run: BucketRun, at: int
) -> None:
    bucket.later = LEASE_SECONDS + 1
    bucket.before = nth(at, unreachable(), ("write", "write_over", "delete", "read", "facts", "list"))
    with suppress(BucketError):
        collected_by(run)
    bucket.before = lambda method, key: None
    assert counted(bucket) == [V3, V2]
    assert len(of_version(bucket, 2)) == len(of_version(bucket, 3)) > 3
    collected_by(run)  # the same publisher goes on
    assert of_version(bucket, 1) == set()


def test_an_object_that_no_manifest_names_stays(bucket: ScriptedBucket, run: BucketRun) -> None:
    foreign = {version_prefix(RUN, Order(1, 1)) + "mine.txt", "exp~trial/versions/notes/mine.txt"}
    for key in foreign:
        asyncio.run(bucket.write(key, b"mine"))
    bucket.later = UPLOAD_SECONDS + 1
    assert collected_by(run).deleted == (V1,)
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
    done = collected_by(run)
    assert done.deleted == ()
    assert "manifest" in done.kept[V1]
    assert of_version(bucket, 1) == before


def test_a_publisher_that_has_lost_the_run_collects_nothing(
    bucket: ScriptedBucket, run: BucketRun, tmp_path: Path
) -> None:
    publish_folder(bucket.sibling(), publish(tmp_path, RUN, 4, tensors(4)))
    bucket.later = LEASE_SECONDS + 1
    with pytest.raises(RunBusyError):
        asyncio.run(collect(run))
    assert of_version(bucket, 1)


def version(step: int, base: int | None = None) -> BucketVersion:
    kind = Kind.FULL if base is None else Kind.DELTA
    return BucketVersion(id=id_of(step), digest=f"d{step}", kind=kind, base=None if base is None else id_of(base))


def id_of(step: int) -> str:
    return f"exp~trial~v{step:06d}"
