"""Real processes and a real server with Azure's API: what is promised of an object store holds in a container too."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from refitd_client import RunBusyError, WeightPublisher
from refitd_client.bucket import objects, run
from refitd_client.bucket.collection import collect_run
from refitd_client.bucket.objects import Bucket, ObjectFacts
from refitd_client.bucket.pointer import FOLLOWERS_PREFIX, LEASE_SECONDS, MAX_BYTES, FollowerNote
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import Kind
from refitd_client.errors import BucketError, PublishError
from support.azure_server import KEY, MISSING, AzuriteServer, azure_server, azurite, shared_access
from support.buckets import counted
from support.checkpoints import tensors, write_model
from support.command_line import refitd
from support.hosts import RUN, hosts, until
from support.published import check

pytestmark = pytest.mark.skipif(azurite() is None, reason=MISSING)
V1, V2, V3 = (f"{RUN}~v00000{step}" for step in (1, 2, 3))
WRONG = base64.b64encode(b"another-hidden-secret").decode()


class LaterBucket(Bucket):
    """What the store writes down as its time is `later` by so many seconds, where a collection asks for it."""

    later = 0.0

    async def facts(self, key: str) -> ObjectFacts | None:
        found = await super().facts(key)
        return None if found is None else replace(found, modified=found.modified + self.later)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[AzuriteServer]:
    with azure_server(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture
def container(server: AzuriteServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A container of its own. The environment has what is needed to reach it, and no more."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "spool"))
    return server.container()


@pytest.fixture
def url(container: str) -> str:
    return f"az://{container}/weights"


def test_full_versions_and_deltas_travel_through_a_container(url: str, tmp_path: Path) -> None:
    weights = tensors(1) | {"large": tensors(1)["layer.0.weight"].repeat(4000, axis=0)}
    with hosts(tmp_path) as all_, WeightPublisher(url, RUN) as publisher:
        base = str(write_model(tmp_path / "larger", weights))
        one = all_.follower("one", "--follower", "one", "--base-model", base, url=url)
        first = publisher.publish(weights, step=1, transport="delta")
        until(lambda: one.serves(1), one)
        assert check(one.root / RUN / "v000001").digest == first.digest
        weights["large"][0, 0] += 1
        delta = publisher.publish(weights, step=2, transport="delta")
        until(lambda: one.following()["ordered"] == V2, one)
        pulled = parse_manifest((one.root / RUN / "v000002" / MANIFEST_NAME).read_bytes())
        assert (pulled.digest, pulled.kind, pulled.base) == (delta.digest, Kind.DELTA, V1)
        note = note_of(url, "one")  # of about when its last pull began or ended
        assert (note.follower, note.run) == ("one", RUN)
        assert V1 in note.holds
        said = one.refitd.log.read_text() + one.get("/v1/overview").text + one.get("/metrics").text
        assert KEY not in said


def note_of(url: str, name: str) -> FollowerNote:
    found = asyncio.run(Bucket.at(url).read(f"{FOLLOWERS_PREFIX}{name}.json", MAX_BYTES))
    assert found is not None
    return msgspec.json.decode(found.data, type=FollowerNote)


@pytest.mark.thorough
def test_a_hub_pushes_into_a_container_that_a_follower_follows(url: str, tmp_path: Path) -> None:
    with hosts(tmp_path, "--push", url) as all_:
        far = all_.follower("far", url=url)
        all_.publish(1)
        until(lambda: far.serves(1), all_.hub, far)
        all_.publish(2)
        until(lambda: far.serves(2), all_.hub, far)
        all_.hub.client.rollback(RUN, V1)
        until(lambda: far.serves(1), all_.hub, far)


def test_of_two_publishers_into_a_container_one_loses(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPublisher(url, RUN) as first:
        first.publish(tensors(1), step=1)
        monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "another host"))
        with WeightPublisher(url, RUN) as second:
            second.publish(tensors(2), step=2)
            with pytest.raises(RunBusyError, match=r"has moved it to run~v000002"):
                first.publish(tensors(3), step=3)
    assert counted(Bucket.at(url), RUN) == [V2, V1]


def test_a_container_keeps_the_conditions_of_writes_and_reads(url: str) -> None:
    async def all_of_it() -> None:
        bucket = Bucket.at(url)
        first = await bucket.write_new("exp~trial/key", b"first")
        assert first is not None
        assert await bucket.write_new("exp~trial/key", b"other") is None
        assert await bucket.read_changed("exp~trial/key", 100, first) == "same"
        second = await bucket.write_over("exp~trial/key", b"second", first)
        assert second is not None
        assert await bucket.write_over("exp~trial/key", b"stale", first) is None
        found = await bucket.read_changed("exp~trial/key", 100, first)
        assert found is not None
        assert found != "same"
        assert (found.data, found.facts.tag) == (b"second", second)
        assert await bucket.facts("exp~trial/key") == found.facts
        assert await bucket.write_over("gone", b"gone", second) is None

    asyncio.run(all_of_it())


def test_a_container_gives_ranges_lists_folders_and_deletes(url: str) -> None:
    async def all_of_it() -> None:
        bucket = Bucket.at(url)
        await bucket.write("a~b/one/key", b"0123456789")
        await bucket.write("a~b/two/key", b"")
        await bucket.write("followers/host%3A8700.json", b"a note")
        into = bytearray(4)
        assert await bucket.fill("a~b/one/key", 3, memoryview(into))
        assert into == b"3456"
        with pytest.raises(BucketError, match="gave 2 bytes of a~b/one/key from 8 on, not 4"):
            await bucket.fill("a~b/one/key", 8, memoryview(into))
        assert not await bucket.fill("a~b/three", 0, memoryview(into))
        assert await bucket.folders("a~b/") == ["one", "two"]
        assert [(found.key, found.size) for found in await bucket.listed("a~b/one/")] == [("a~b/one/key", 10)]
        assert [found.key for found in await bucket.listed("followers/")] == ["followers/host%3A8700.json"]
        assert (await bucket.read("followers/host%3A8700.json", 100)) is not None
        await bucket.delete("a~b/one/key")
        await bucket.delete("a~b/one/key")
        assert await bucket.read("a~b/one/key", 100) is None
        assert await bucket.folders("a~b/") == ["two"]

    asyncio.run(all_of_it())


def test_a_large_file_goes_into_a_container_in_parts(
    url: str, container: str, server: AzuriteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (run, objects):
        monkeypatch.setattr(module, "PART", 2**16)
    with WeightPublisher(url, RUN) as publisher:
        publisher.publish({"large": np.arange(2**16, dtype=np.float32)}, step=1)
    listed = asyncio.run(Bucket.at(url).listed(f"{RUN}/versions/v000001/"))
    large = max(listed, key=lambda found: found.size)
    assert server.blocks(container, f"weights/{RUN}/versions/v000001/{large.key.rpartition('/')[2]}") == 5


def test_a_part_that_cannot_be_read_leaves_no_blob(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART", 2**16)

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(2**17)
        raise OSError("the disk is gone")

    with pytest.raises(BucketError, match="failed, to write key"):
        asyncio.run(Bucket.at(url).upload("key", pieces()))
    assert asyncio.run(Bucket.at(url).facts("key")) is None


def test_a_collection_of_a_container_takes_what_no_note_leases(url: str) -> None:
    async def all_of_it() -> None:
        bucket = LaterBucket.at(url)
        assert isinstance(bucket, LaterBucket)
        first = f"{RUN}/versions/v000001/"
        assert (await collect_run(bucket, RUN, keep=2)).retired == (V1,)
        await bucket.write(f"{FOLLOWERS_PREFIX}f.json", leases(pulls=(V1,), lease_seconds=2 * LEASE_SECONDS))
        bucket.later = LEASE_SECONDS + 60
        assert (await collect_run(bucket, RUN)).waiting == (V1,)
        assert await bucket.listed(first)
        await bucket.write(f"{FOLLOWERS_PREFIX}f.json", leases(pulls=(V2,)))
        assert (await collect_run(bucket, RUN)).deleted == (V1,)
        assert await bucket.listed(first) == []
        assert await bucket.listed(f"{RUN}/versions/v000002/")

    with WeightPublisher(url, RUN) as publisher:
        for step in (1, 2, 3):
            publisher.publish(tensors(step), step=step)
    asyncio.run(all_of_it())
    assert counted(Bucket.at(url), RUN) == [V3, V2]


def leases(*, pulls: tuple[str, ...], lease_seconds: float = LEASE_SECONDS) -> bytes:
    return msgspec.json.encode(FollowerNote(follower="f", pulls=pulls, lease_seconds=lease_seconds))


def test_doctor_tries_a_container_by_the_flags_of_serve(url: str, tmp_path: Path) -> None:
    said = refitd("doctor", "--root", str(tmp_path), "--follow", url, "--push", f"{url}/copy").stdout
    assert "it can be read, and holds no run" in said
    assert "it can be written, and keeps conditions of writes" in said


def test_a_wrong_key_ends_in_a_sentence_without_it(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", WRONG)
    caplog.set_level(logging.DEBUG)
    bucket = Bucket.at(url)
    for asked in (bucket.read("key", 100), bucket.write("key", b""), bucket.listed("folder/")):
        with pytest.raises(BucketError, match=r"refuses to \w+ (key|folder/): give this process credentials") as failed:
            asyncio.run(asked)
        assert not failed.value.may_heal
        assert WRONG not in str(failed.value)
    with pytest.raises(BucketError, match="refuses to"):
        WeightPublisher(url, RUN)
    for text in (WRONG, "SharedKey", "another-hidden"):
        assert text not in caplog.text


def test_a_shared_access_signature_may_what_its_rights_say_and_is_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with WeightPublisher(url, RUN) as publisher:
        publisher.publish(tensors(1), step=1)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", reading := shared_access("rl"))
    assert counted(Bucket.at(url), RUN) == [V1]
    with pytest.raises(BucketError, match="refuses to write probes/") as failed:
        WeightPublisher(url, RUN)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access("rw"))
    asyncio.run(Bucket.at(url).write(f"{FOLLOWERS_PREFIX}f.json", leases(pulls=(V1,))))
    assert note_of(url, "f").pulls == (V1,)
    assert "sig=" in reading
    assert "sig=" not in str(failed.value) + caplog.text


def test_a_container_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(PublishError, match="az://nothere/weights cannot be written: there is no such bucket"):
        WeightPublisher("az://nothere/weights", RUN)
