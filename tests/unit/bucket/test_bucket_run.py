"""A version counts in a bucket when it is whole there, and for one writer alone; wherever that one is killed."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from refitd_client.bucket import objects
from refitd_client.bucket.objects import Bucket, ObjectTag
from refitd_client.bucket.pointer import RUNS_KEY, Pointer, pointer_key, version_prefix
from refitd_client.bucket.run import BucketRun, list_runs, require_conditions
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order
from refitd_client.errors import BucketError, RunBusyError, StepConflictError
from support.buckets import RUN, KilledError, ScriptedBucket, counted, keys, nth, publish_folder, unreachable
from support.checkpoints import publish, tensors

V1, V2, V3 = (f"exp~trial~v00000{step}" for step in (1, 2, 3))
WRITES = ("write_new", "write_over", "write", "upload")


def folder_of(root: Path, step: int) -> Path:
    return publish(root, RUN, step, tensors(step))


def test_publishing_lists_nothing(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    publish_folder(bucket, folder_of(tmp_path, 2), run=run)
    assert "list" not in {method for method, _ in bucket.asked}


def test_the_manifest_is_written_after_all_files_and_the_pointer_after_it(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    publish_folder(bucket, folder_of(tmp_path, 1))
    written = [key.rpartition("/")[2] for method, key in bucket.asked if method in WRITES and RUN[:3] in key]
    assert written[0] == "upload.json"
    assert written[-2:] == [MANIFEST_NAME, "latest.json"]


def test_a_large_file_is_uploaded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_client.bucket.run.PART", 64)
    monkeypatch.setattr(objects, "PART", 64)
    bucket, folder = ScriptedBucket(), folder_of(tmp_path, 1)
    publish_folder(bucket, folder)
    assert "upload" in {method for method, _ in bucket.asked}
    for name, file in parse_manifest((folder / MANIFEST_NAME).read_bytes()).files.items():
        found = asyncio.run(bucket.read(version_prefix(RUN, Order(1, 1)) + name, file.size))
        assert found is not None
        assert found.data == (folder / name).read_bytes()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(7))
def test_a_publisher_killed_at_any_write_leaves_whole_versions_alone(tmp_path: Path, at: int, when: str) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    setattr(bucket, when, nth(at, KilledError(), WRITES))
    newer = folder_of(tmp_path, 2)
    try:
        publish_folder(bucket, newer, run=run)
        is_killed = False
    except KilledError:
        is_killed = True
    healthy = bucket.sibling()
    assert counted(healthy) in ([V1], [V2, V1])
    assert is_killed or counted(healthy) == [V2, V1]
    for each in counted(healthy):
        order = Order(1, int(each[-6:]))
        data = asyncio.run(healthy.read(version_prefix(RUN, order) + MANIFEST_NAME, 2**20))
        assert data is not None
        for name, file in parse_manifest(data.data).files.items():
            facts = asyncio.run(healthy.facts(version_prefix(RUN, order) + name))
            assert facts is not None
            assert facts.size == file.size
    publish_folder(healthy, folder_of(tmp_path, 3))  # the run goes on, by another publisher
    assert counted(healthy)[0] == V3


@pytest.mark.parametrize("at", range(12))
def test_a_store_that_is_not_there_at_any_request_fails_the_publication_or_not(tmp_path: Path, at: int) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    bucket.before = nth(at, unreachable(), (*WRITES, "read", "facts"))
    try:
        publish_folder(bucket, folder_of(tmp_path, 2), run=run)
    except BucketError:
        assert counted(bucket) == [V1]
    else:
        assert counted(bucket) == [V2, V1]
    bucket.before = lambda method, key: None
    publish_folder(bucket, folder_of(tmp_path, 3), run=run)  # the same publisher goes on
    assert counted(bucket)[0] == V3


@pytest.mark.parametrize("method", ["write_new", "write_over"])
def test_a_conditional_write_whose_answer_is_lost_was_ours(tmp_path: Path, method: str) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    bucket.after = nth(0, unreachable(), (method,))
    publish_folder(bucket, folder_of(tmp_path, 2), run=run)
    assert counted(bucket) == [V2, V1]


def test_a_pointer_whose_write_was_broken_off_is_looked_at_before_the_next_version(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    bucket.after = nth(0, asyncio.CancelledError(), ("write_over",))  # an interrupt; the write was carried out
    with pytest.raises(asyncio.CancelledError):
        publish_folder(bucket, folder_of(tmp_path, 2), run=run)
    publish_folder(bucket, folder_of(tmp_path, 3), run=run)
    assert counted(bucket) == [V3, V2]


def test_of_two_publishers_one_loses_and_says_to_whom(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    first = publish_folder(bucket, folder_of(tmp_path, 1))
    second = publish_folder(bucket.sibling(), folder_of(tmp_path, 2))
    with pytest.raises(RunBusyError, match=f"has moved it to {V2} .{second.writer}") as refused:
        publish_folder(bucket, folder_of(tmp_path, 3), run=first)
    assert "Stop one of them" in str(refused.value)
    assert counted(bucket) == [V2, V1]
    with pytest.raises(RunBusyError):  # and from then on before any byte travels
        publish_folder(bucket, folder_of(tmp_path, 4), run=first)


@pytest.mark.parametrize("steers", [False, True])
def test_a_publisher_that_takes_a_run_from_a_hub_has_what_it_publishes_served_and_a_hub_says_so_itself(
    tmp_path: Path, steers: bool
) -> None:
    bucket = ScriptedBucket()
    hub = publish_folder(bucket, folder_of(tmp_path, 1))
    asyncio.run(hub.move(lambda pointer: replace(pointer, desired=V1)))  # type: ignore[type-var]

    async def take_over() -> Pointer | None:
        other, folder = BucketRun(bucket.sibling(), RUN, keep=2, steers=steers), folder_of(tmp_path, 2)
        await other.begin()
        await other.publish(folder, (folder / MANIFEST_NAME).read_bytes())
        return other.pointer

    pointer = asyncio.run(take_over())
    assert pointer is not None
    assert pointer.target == (V1 if steers else V2)


def test_what_a_hub_publishes_is_wanted_when_it_says_so_and_not_before(tmp_path: Path) -> None:
    """Two versions in a row, the first of which nothing was said of yet: followers would go on and back again."""
    bucket = ScriptedBucket()
    hub = BucketRun(bucket, RUN, keep=2, steers=True)

    async def publish(step: int) -> str | None:
        folder = folder_of(tmp_path, step)
        await hub.publish(folder, (folder / MANIFEST_NAME).read_bytes())
        assert hub.pointer is not None
        return hub.pointer.target

    async def publish_two() -> list[str | None]:
        await hub.begin()
        return [await publish(1), await publish(2)]

    assert asyncio.run(publish_two()) == [V1, V1]


def test_a_pointer_that_somebody_deleted_ends_the_publisher_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 1))
    asyncio.run(bucket.delete(pointer_key(RUN)))
    with pytest.raises(RunBusyError, match=r"was deleted.*Restore exp~trial/latest.json, or open a new publisher"):
        publish_folder(bucket, folder_of(tmp_path, 2), run=run)
    assert counted(bucket) == []
    publish_folder(bucket, folder_of(tmp_path, 3))
    assert counted(bucket) == [V3]


def test_two_publishers_of_one_version_do_not_mix_their_files(tmp_path: Path) -> None:
    bucket = ScriptedBucket()

    async def race() -> list[BaseException | None]:
        runs = [BucketRun(bucket, RUN, keep=2) for _ in range(2)]
        for run in runs:
            await run.begin()
        folder = folder_of(tmp_path, 1)
        data = (folder / MANIFEST_NAME).read_bytes()
        return list(await asyncio.gather(*(run.publish(folder, data) for run in runs), return_exceptions=True))

    outcomes = asyncio.run(race())
    lost = [outcome for outcome in outcomes if outcome is not None]
    assert len(lost) == 1
    assert isinstance(lost[0], RunBusyError)
    assert counted(bucket) == [V1]


def test_two_publishers_of_one_version_with_other_bytes_do_not_mix_their_files(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    bucket.before = nth(0, KilledError(), ("write",))  # upload.json is there, and no more
    with pytest.raises(KilledError):
        publish_folder(bucket, publish(tmp_path / "one", RUN, 1, tensors(1)))
    with pytest.raises(RunBusyError, match="was begun by another publisher"):
        publish_folder(bucket.sibling(), publish(tmp_path / "other", RUN, 1, tensors(2)))
    assert counted(bucket) == []


@pytest.mark.parametrize("at", range(3))
def test_a_hub_that_was_killed_during_an_upload_uploads_the_same_version_when_it_is_back(
    at: int, tmp_path: Path
) -> None:
    bucket, folder = ScriptedBucket(), folder_of(tmp_path, 1)
    bucket.before = nth(at, KilledError(), ("write",))
    with pytest.raises(KilledError):
        publish_folder(bucket, folder)
    back = bucket.sibling()
    publish_folder(back, folder)
    assert counted(back) == [V1]


def test_a_version_that_is_not_newer_is_refused_before_any_byte_travels(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    run = publish_folder(bucket, folder_of(tmp_path, 2))
    bucket.asked.clear()
    with pytest.raises(StepConflictError, match="not newer"):
        publish_folder(bucket, folder_of(tmp_path, 1), run=run)
    assert bucket.asked == []


@pytest.mark.parametrize("part", [64, objects.PART])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1] + b"!"), "is not what its manifest says"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), "is not what its manifest says"),
        (lambda shard: shard.write_bytes(shard.read_bytes() + b"x" * 100), "is not what its manifest says"),
        (lambda shard: shard.symlink_to(shard.rename(shard.parents[1] / "else")), "could not be read: it is a link"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_no_version_and_no_link_is_followed(
    change: Callable[[Path], object], said: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd_client.bucket.run.PART", part)
    bucket, folder = ScriptedBucket(), folder_of(tmp_path, 1)
    shard = next(folder.glob("*.safetensors"))
    change(shard)
    with pytest.raises(BucketError, match=f"{shard.name} {said}"):
        publish_folder(bucket, folder)
    assert counted(bucket) == []


def test_a_store_that_keeps_no_conditions_is_refused() -> None:
    class Careless(ScriptedBucket):
        async def write_over(self, key: str, data: bytes, seen: ObjectTag) -> ObjectTag | None:
            return await self.write(key, data)

    with pytest.raises(BucketError, match=r"does not keep conditions of writes \(If-Match\)"):
        asyncio.run(require_conditions(Careless()))


def test_what_the_trial_of_conditions_says_is_not_hidden_by_a_deletion_that_fails_after_it() -> None:
    def refuses(method: str, key: str) -> None:
        raise BucketError(f"the store refuses to {method} {key}")

    bucket = ScriptedBucket()
    bucket.before = refuses
    with pytest.raises(BucketError, match="refuses to write_new probes/"):
        asyncio.run(require_conditions(bucket))
    assert [method for method, _ in bucket.asked] == ["write_new", "delete"]


def test_the_trial_of_conditions_leaves_nothing() -> None:
    bucket = ScriptedBucket()
    asyncio.run(require_conditions(bucket))
    assert keys(bucket) == set()


def test_a_pointer_that_is_none_is_not_written_over(tmp_path: Path) -> None:
    bucket = ScriptedBucket()
    asyncio.run(bucket.write("exp~trial/latest.json", b"mine"))
    with pytest.raises(BucketError, match="is not the pointer of run exp/trial"):
        publish_folder(bucket, folder_of(tmp_path, 1))
    assert asyncio.run(bucket.read("exp~trial/latest.json", 99)).data == b"mine"  # type: ignore[union-attr]


def test_runs_that_begin_at_once_are_all_listed() -> None:
    bucket = ScriptedBucket()

    async def begin() -> None:
        await asyncio.gather(*(BucketRun(bucket, f"run-{at}", keep=1)._register() for at in range(3)))

    asyncio.run(begin())
    assert asyncio.run(list_runs(bucket)) == ("run-0", "run-1", "run-2")
    assert RUNS_KEY in keys(bucket)


def test_no_error_tells_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hidden-secret@127.0.0.1:9/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
    monkeypatch.setattr("refitd_client.bucket.objects.RETRIES", 0)
    with pytest.raises(BucketError) as failed:
        asyncio.run(Bucket.at("s3://bucket/prefix").facts("key"))
    error: BaseException | None = failed.value
    assert "s3://bucket/prefix" in str(error)
    assert "hidden" not in str(error)
    assert error is not None
    assert error.__suppress_context__  # a traceback would print the library's own text


@pytest.mark.parametrize(
    "url", ["s3://key:hidden@bucket/p", "s3://bucket/p?sig=hidden", "s3://bucket/p#hidden", "s3://hidden@bucket"]
)
def test_a_url_with_a_credential_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="credentials by the environment") as refused:
        Bucket.at(url)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket/../other"])
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="object store"):
        Bucket.at(url)


def test_a_range_that_is_short_is_an_error() -> None:
    bucket = Bucket(MemoryStore(), "s3://bucket")

    async def read() -> None:
        await bucket.write("key", b"12345")
        await bucket.fill("key", 2, memoryview(bytearray(9)))

    with pytest.raises(BucketError, match="gave 3 bytes of key from 2 on, not 9"):
        asyncio.run(read())
