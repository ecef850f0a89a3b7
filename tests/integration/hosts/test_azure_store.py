"""Real processes and a real server with Azure's API: what is promised of an object store holds in a container too."""

import asyncio
import base64
import logging
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from refitd_client import WeightPublisher
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import FOLLOWERS_PREFIX, LEASE_SECONDS, MAX_BYTES, FollowerNote
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import Kind
from refitd_client.errors import BucketError
from support.azure_server import KEY, MISSING, AzuriteServer, azure_server, azurite, shared_access
from support.buckets import counted
from support.checkpoints import tensors, write_model
from support.hosts import RUN, hosts, until
from support.published import check

pytestmark = [pytest.mark.stores, pytest.mark.skipif(azurite() is None, reason=MISSING)]
V1, V2, V3 = (f"{RUN}~v00000{step}" for step in (1, 2, 3))
WRONG = base64.b64encode(b"another-hidden-secret").decode()


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


def leases(*, pulls: tuple[str, ...], lease_seconds: float = LEASE_SECONDS) -> bytes:
    return msgspec.json.encode(FollowerNote(follower="f", pulls=pulls, lease_seconds=lease_seconds))


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
