"""Real processes and a real S3 server: a trainer, a hub that pushes, and followers that share nothing but a bucket."""

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from refitd_client.bucket.objects import Bucket
from support.buckets import counted
from support.hosts import RUN, Host, hosts, until
from support.published import check
from support.s3_server import KEY, SECRET, S3Server, missing, s3_server

pytestmark = [pytest.mark.stores, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


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


def _says_no_secret(host: Host) -> None:
    said = host.refitd.log.read_text() + host.get("/v1/overview").text + host.get("/metrics").text
    assert SECRET not in said
    assert KEY not in said
