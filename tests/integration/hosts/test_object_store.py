"""Real processes and a real S3 server: a trainer, a hub that pushes, and followers that share nothing but a bucket."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from refitd_client import RunBusyError, WeightPublisher
from refitd_client.bucket.collection import collect_run
from refitd_client.bucket.objects import Bucket
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import Kind
from support.buckets import counted
from support.checkpoints import tensors, write_model
from support.hosts import RUN, Host, hosts, until
from support.published import check
from support.s3_server import KEY, SECRET, S3Server, missing, s3_server

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
BEFORE = """
import sys, time
from refitd_client import WeightPublisher
import refitd_client.bucket.objects as objects
from support.checkpoints import tensors, write_model
real = objects.Bucket.write
async def write(self, key, data):
    if key.endswith("refit.json") and "v000002" in key:
        print("uploaded", flush=True)
        time.sleep(600)
    return await real(self, key, data)
objects.Bucket.write = write
publisher = WeightPublisher(sys.argv[1], "run")
publisher.publish(tensors(1), step=1)
publisher.publish(tensors(2), step=2)
"""


@pytest.fixture(scope="module")
def server() -> Generator[S3Server]:
    folder = Path(tempfile.mkdtemp(prefix="s3-"))  # its path is short: sockets lie in it
    with s3_server(folder) as running:
        yield running


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A prefix in a bucket of its own. The environment has what is needed to reach it, and no more."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "spool"))
    return f"s3://{server.bucket()}/weights"


@pytest.mark.thorough
def test_followers_of_a_bucket_serve_what_a_trainer_publishes_with_no_hub(url: str, tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        one, other = all_.follower("one", url=url), all_.follower("other", url=url)
        with WeightPublisher(url, RUN) as publisher:
            first = publisher.publish(tensors(1), step=1)
            until(lambda: one.serves(1) and other.serves(1), one, other)
            publisher.publish(tensors(2), step=2)
            until(lambda: one.serves(2) and other.serves(2), one, other)
        for host in (one, other):
            assert check(host.root / RUN / "v000001").digest == first.digest
            assert host.following()["upstream"] == url
        _says_no_secret(one)


def test_a_hub_pushes_and_a_follower_in_another_region_pushes_on(url: str, server: S3Server, tmp_path: Path) -> None:
    there = f"s3://{server.bucket()}/copy"
    with hosts(tmp_path, "--push", url) as all_:
        region = all_.follower("region", "--push", there, url=url)
        far = all_.follower("far", url=there)
        all_.publish(1)
        until(lambda: region.serves(1) and far.serves(1), all_.hub, region, far)
        all_.publish(2)
        until(lambda: far.serves(2), all_.hub, region, far)
        all_.hub.client.rollback(RUN, "run~v000001")
        until(lambda: region.serves(1) and far.serves(1), all_.hub, region, far)
        assert counted(Bucket.at(there), RUN)[0] == "run~v000002"
        _says_no_secret(all_.hub)


def test_led_hosts_pull_from_the_store_that_their_hub_pushes_into_and_one_without_credentials_from_the_hub(
    url: str, tmp_path: Path
) -> None:
    with hosts(tmp_path, "--push", url) as all_:
        hub = all_.hub
        first = all_.publish(1)
        until(lambda: "pushed" in said(hub, first), hub)
        one = all_.led("one")
        bare = all_.host("bare", "--follow", hub.refitd.url, "--follower", "bare", first=without_a_store)
        with bare.refitd:
            until(lambda: one.serves(1) and bare.serves(1), hub, one, bare)
            assert f"s from {url}" in said(one, first)
            assert f"s from {hub.refitd.url}" in said(bare, first)
            assert check(one.root / RUN / "v000001").digest == check(bare.root / RUN / "v000001").digest
            why = f"It pulls from its upstream, and not from the object store: {url} is not asked, since"
            until(lambda: why in explained(hub, "bare"), hub, bare)
            until(lambda: why in explained(bare, bare.client.engines().items[0].id), bare)
            assert "object store" not in explained(hub, "one")
        _says_no_secret(one)


def test_a_host_whose_store_is_damaged_pulls_from_its_hub_in_turn_and_says_so(url: str, tmp_path: Path) -> None:
    with hosts(tmp_path, "--push", url) as all_:
        hub = all_.hub
        first = all_.publish(1)
        until(lambda: "pushed" in said(hub, first), hub)
        shard = next((hub.root / RUN / "v000001").glob("*.safetensors"))
        key = f"{RUN}/versions/v000001/{shard.name}"
        asyncio.run(Bucket.at(url).write(key, bytes(shard.stat().st_size)))
        one = all_.led("one")
        until(lambda: one.serves(1), hub, one)
        assert f"s from {hub.refitd.url}" in said(one, first)
        why = f"not from the object store: {url} gave wrong bytes of {shard.name}"
        until(lambda: why in explained(one, one.client.engines().items[0].id), one)
        until(lambda: why in explained(hub, "one"), hub, one)


def without_a_store() -> None:
    """The environment says nothing of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]


def said(host: Host, version: str) -> str:
    """What a service has said of a version."""
    return "\n".join(
        entry["text"]
        for entry in host.get("/v1/log", params={"limit": 200}).json()["items"]
        if entry["subject"] == version
    )


def explained(host: Host, engine: str) -> str:
    """The explanation of an engine."""
    return " ".join(host.client.explain(engine).sentences)


def test_where_a_hub_goes_back_to_what_the_store_has_no_more_hub_and_follower_say_so(url: str, tmp_path: Path) -> None:
    with hosts(tmp_path, "--push", url) as all_:
        hub, one = all_.hub, all_.follower("one", url=url)
        for step in (1, 2, 3):
            all_.publish(step)
            until(lambda step=step: one.serves(step), hub, one)
        asyncio.run(collect_run(Bucket.at(url), RUN, keep=1))  # as an operator who is short of room: refitd collect
        hub.client.rollback(RUN, "run~v000001")
        missing_there = "engines here are to serve run~v000001, which is not in the store any more"
        until(lambda: missing_there in (hub.get("/v1/overview").json()["faults"]["push"] or ""), hub, one)
        barred = "the upstream has no version of run to serve: all are barred there"
        until(lambda: one.get("/v1/overview").json()["faults"]["upstream"] == barred, hub, one)
        all_.publish(4)
        until(lambda: one.serves(4) and one.get("/v1/overview").json()["faults"]["upstream"] is None, hub, one)
        assert hub.get("/v1/overview").json()["faults"]["push"] is None


def test_a_publisher_killed_before_the_manifest_has_published_nothing_and_the_run_goes_on(
    url: str, tmp_path: Path
) -> None:
    script = subprocess.Popen([sys.executable, "-c", BEFORE, url], stdout=subprocess.PIPE, env=_environment())
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == b"uploaded\n"
    finally:
        script.kill()
        script.wait()
        if script.stdout is not None:
            script.stdout.close()
    assert counted(Bucket.at(url), RUN) == ["run~v000001"]
    with WeightPublisher(url, RUN) as publisher:
        assert publisher.publish(tensors(2), step=2).version_id == "run~v000002.g2"
    assert counted(Bucket.at(url), RUN) == ["run~v000002.g2", "run~v000001"]


def _environment() -> dict[str, str]:
    tests = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(tests)}


def test_of_two_publishers_one_loses_at_the_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightPublisher(url, RUN) as first:
        first.publish(tensors(1), step=1)
        monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "another host"))
        with WeightPublisher(url, RUN) as second:
            second.publish(tensors(2), step=2)
            with pytest.raises(RunBusyError, match=r"has moved it to run~v000002"):
                first.publish(tensors(3), step=3)
    assert counted(Bucket.at(url), RUN) == ["run~v000002", "run~v000001"]


def test_deltas_travel_as_deltas(url: str, tmp_path: Path) -> None:
    weights = tensors(1) | {"large": tensors(1)["layer.0.weight"].repeat(4000, axis=0)}
    with hosts(tmp_path) as all_, WeightPublisher(url, RUN) as publisher:
        one = all_.follower("one", "--base-model", str(write_model(tmp_path / "larger", weights)), url=url)
        publisher.publish(weights, step=1, transport="delta")
        until(lambda: one.serves(1), one)
        weights["large"][0, 0] += 1
        delta = publisher.publish(weights, step=2, transport="delta")
        assert delta.kind is Kind.DELTA
        until(lambda: one.following()["ordered"] == "run~v000002", one)
        pulled = parse_manifest((one.root / RUN / "v000002" / MANIFEST_NAME).read_bytes())
        assert (pulled.digest, pulled.kind, pulled.base) == (delta.digest, Kind.DELTA, "run~v000001")


@pytest.mark.thorough
def test_a_follower_whose_store_is_gone_serves_on(url: str, server: S3Server, tmp_path: Path) -> None:
    with hosts(tmp_path) as all_, WeightPublisher(url, RUN) as publisher:
        one = all_.follower("one", url=url)
        publisher.publish(tensors(1), step=1)
        until(lambda: one.serves(1), one)
        stopped = _stop(server)
        try:
            until(lambda: one.following()["fault"] is not None, one)
            assert "nothing was heard from an upstream since" in one.following()["fault"]
            assert one.serves(1)
            assert one.client.ready()
        finally:
            stopped.resume()
        publisher.publish(tensors(2), step=2)
        until(lambda: one.serves(2), one)


def _stop(server: S3Server) -> psutil.Process:
    """Stop the server's process, whose connections then stall."""
    port = int(server.url.rpartition(":")[2])
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.name() == "radosgw" and any(at.laddr.port == port for at in process.net_connections()):
                process.suspend()
                return process
    raise AssertionError("radosgw is not there")


def _says_no_secret(host: Host) -> None:
    said = host.refitd.log.read_text() + host.get("/v1/overview").text + host.get("/metrics").text
    assert SECRET not in said
    assert KEY not in said
