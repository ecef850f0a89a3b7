"""A follower of a bucket: it pulls what the pointer names, believes no byte, and its note keeps what it pulls."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from refitd_client.bucket.pointer import FOLLOWERS_PREFIX, LEASE_SECONDS, version_prefix
from refitd_client.contract.follow import Following, HostReport
from refitd_client.contract.naming import Order
from refitd_hosts.composing import connect_upstream
from refitd_hosts.follow import bucket as followed
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.options import check_upstream
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.upstream import FilePart, FollowedSources, GoneError, UnreachableError, WrongError
from support.buckets import NAME, RUN, ScriptedBucket, collected, keys, nth, publish_folder, unreachable
from support.checkpoints import publish, tensors
from support.published import check

V1, V2 = "exp~trial~v000001", "exp~trial~v000002"


@pytest.fixture
def bucket() -> ScriptedBucket:
    return ScriptedBucket()


def pull(bucket: ScriptedBucket, root: Path, version: str = V1) -> Path:
    """Pull a version into a root, as a follower does, by the digest that the pointer has; its folder."""

    async def pulled() -> None:
        upstream = BucketUpstream(bucket)
        runs = await upstream.look(None)
        digest = next(each.digest for each in runs[0].versions if each.id == version)
        puller = Puller(root, FollowedSources([upstream]), sleep=_no_pause)
        try:
            await puller.pull(version, digest or "")
        finally:
            puller.close()

    asyncio.run(pulled())
    return root / RUN / version.rpartition("~")[2]


async def _no_pause(seconds: float) -> None:
    del seconds


def test_a_follower_pulls_what_was_published_and_lists_nothing(bucket: ScriptedBucket, tmp_path: Path) -> None:
    source = publish(tmp_path / "trainer", RUN, 1, tensors(1))
    publish_folder(bucket, source)
    folder = pull(bucket, tmp_path / "host")
    check(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    assert "list" not in {method for method, _ in bucket.asked}


def test_the_upstream_wants_the_newest_version(bucket: ScriptedBucket, tmp_path: Path) -> None:
    run = publish_folder(bucket, publish(tmp_path, RUN, 1, tensors(1)))
    publish_folder(bucket, publish(tmp_path, RUN, 2, tensors(2)), run=run)
    (seen,) = asyncio.run(BucketUpstream(bucket).look(RUN))
    assert seen.desired == V2
    assert [version.id for version in seen.versions] == [V2, V1]


def test_wrong_bytes_are_named_and_not_taken(bucket: ScriptedBucket, tmp_path: Path) -> None:
    publish_folder(bucket, publish(tmp_path / "trainer", RUN, 1, tensors(1)))

    def damage(key: str, start: int, buffer: memoryview) -> None:
        if key.endswith(".safetensors"):
            buffer[-1] ^= 1

    bucket.damage = damage
    with pytest.raises(WrongError, match=r"s3://bucket/prefix gave wrong bytes of model-0000\d-of-00002.safetensors"):
        pull(bucket, tmp_path / "host")
    assert not (tmp_path / "host" / RUN / "v000001").exists()


def test_bytes_that_were_wrong_once_are_pulled_again(bucket: ScriptedBucket, tmp_path: Path) -> None:
    publish_folder(bucket, publish(tmp_path / "trainer", RUN, 1, tensors(1)))
    left = [1]

    def damage(key: str, start: int, buffer: memoryview) -> None:
        if key.endswith(".safetensors") and left[0]:
            left[0] -= 1
            buffer[:] = bytes(reversed(buffer))  # another order

    bucket.damage = damage
    check(pull(bucket, tmp_path / "host"))


@pytest.mark.parametrize("at", range(6))
def test_a_store_that_is_away_for_one_request_of_a_pull_does_not_end_it(
    bucket: ScriptedBucket, tmp_path: Path, at: int
) -> None:
    publish_folder(bucket, publish(tmp_path / "trainer", RUN, 1, tensors(1)))
    bucket.before = nth(at, unreachable(), ("fill",))
    check(pull(bucket, tmp_path / "host"))


def test_a_version_that_is_collected_during_a_pull_is_gone(bucket: ScriptedBucket, tmp_path: Path) -> None:
    publish_folder(bucket, publish(tmp_path / "trainer", RUN, 1, tensors(1)))
    shard = version_prefix(RUN, Order(1, 1)) + "model-00002-of-00002.safetensors"
    asyncio.run(bucket.delete(shard))
    with pytest.raises(GoneError, match=r"model-00002-of-00002\.safetensors of exp~trial~v000001 any more"):
        pull(bucket, tmp_path / "host")
    assert not (tmp_path / "host" / RUN / "v000001").exists()


def test_what_a_follower_says_that_it_pulls_is_not_collected(bucket: ScriptedBucket, tmp_path: Path) -> None:
    run = publish_folder(bucket, publish(tmp_path, RUN, 1, tensors(1)), keep=1)
    publish_folder(bucket, publish(tmp_path, RUN, 2, tensors(2)), run=run)
    bucket.later = LEASE_SECONDS + 1
    told = Following(follower="host/1:8700", upstream="", upstreams=[])
    answer = asyncio.run(BucketUpstream(bucket).report(HostReport(told=told, pulls=(V1,))))
    assert answer.lease_seconds == LEASE_SECONDS
    assert f"{FOLLOWERS_PREFIX}host%2F1%3A8700.json" in keys(bucket) or any(
        key.startswith(FOLLOWERS_PREFIX) for key in keys(bucket)
    )
    assert collected(run).deleted == ()


def test_a_pointer_that_goes_back_is_not_followed(bucket: ScriptedBucket, tmp_path: Path) -> None:
    publish_folder(bucket, publish(tmp_path, RUN, 2, tensors(2)))
    upstream = BucketUpstream(bucket)

    async def look() -> None:
        await upstream.look(RUN)
        other = ScriptedBucket()
        await asyncio.to_thread(publish_folder, other, publish(tmp_path, RUN, 1, tensors(1)))
        older = await other.read("exp~trial/latest.json", 2**20)
        assert older is not None
        await bucket.write("exp~trial/latest.json", older.data)
        await upstream.look(RUN)

    with pytest.raises(WrongError, match="went back"):
        asyncio.run(look())


def test_a_pointer_that_somebody_deleted_is_said_and_is_no_run_without_versions(
    bucket: ScriptedBucket, tmp_path: Path
) -> None:
    publish_folder(bucket, publish(tmp_path, RUN, 1, tensors(1)))
    upstream = BucketUpstream(bucket)

    async def look() -> None:
        await upstream.look(RUN)
        await bucket.delete("exp~trial/latest.json")
        await upstream.look(RUN)

    with pytest.raises(WrongError, match=r"was deleted: this host serves on. Restore exp~trial/latest.json"):
        asyncio.run(look())


@pytest.mark.parametrize("at", range(4))
def test_a_store_that_is_away_for_any_look_of_a_pull_is_asked_again(
    bucket: ScriptedBucket, tmp_path: Path, at: int
) -> None:
    """The list of runs, the pointer, the manifest: a follower that fails there begins again and lacks nothing."""
    publish_folder(bucket, publish(tmp_path / "trainer", RUN, 1, tensors(1)))
    bucket.before = nth(at, unreachable(), ("read",))
    try:
        folder = pull(bucket, tmp_path / "host")
    except UnreachableError:
        bucket.before = lambda method, key: None
        folder = pull(bucket, tmp_path / "host")
    check(folder)


def test_a_moved_pointer_is_a_change(bucket: ScriptedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "CHANGES_SECONDS", 0.0)
    run = publish_folder(bucket, publish(tmp_path, RUN, 1, tensors(1)))
    upstream = BucketUpstream(bucket)

    async def changed() -> None:
        await upstream.look(RUN)
        await asyncio.to_thread(publish_folder, bucket, publish(tmp_path, RUN, 2, tensors(2)), run=run)
        async with asyncio.timeout(10), aclosing(upstream.changes("f")) as changes:  # type: ignore[type-var]
            await anext(changes)

    asyncio.run(changed())


def test_a_part_outside_the_versions_folder_is_not_asked_for(bucket: ScriptedBucket) -> None:
    part = FilePart(version=V1, file="../latest.json", start=0, length=1)
    with pytest.raises(WrongError, match="no version's file"):
        asyncio.run(BucketUpstream(bucket).fill(part, memoryview(bytearray(1))))


def test_the_url_of_a_store_names_an_upstream() -> None:
    assert connect_upstream(NAME, token_file=None).name == NAME


@pytest.mark.parametrize(
    "url", ["s3://key:hidden@bucket/p", "s3://bucket?x=hidden", "http://u:hidden@hub", "s3a://h@b"]
)
def test_an_upstream_with_credentials_in_its_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/prefix") as refused:
        check_upstream(url)
    assert "hidden" not in str(refused.value)
