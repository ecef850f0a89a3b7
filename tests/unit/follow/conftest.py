"""A pull of a small version in blocks of 64 bytes."""

from pathlib import Path

import pytest

from refitd_client.contract import manifest
from refitd_hosts.follow.puller import Puller
from support.checkpoints import publish, tensors
from support.pulls import RUN, FakeSource, FakeSources, Stage, no_sleep


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """One version at the hub, nothing here. Blocks have 64 bytes, so that small files have several."""
    monkeypatch.setattr("refitd_hosts.follow.puller.BLOCK", 64)
    monkeypatch.setattr(manifest, "BLOCK", 64)
    hub, root = tmp_path / "hub", tmp_path / "root"
    root.mkdir()
    publish(hub, RUN, 1, tensors(1))
    upstream = FakeSource(hub)
    sources = FakeSources(upstream)
    return Stage(hub, root, upstream, sources, Puller(root, sources, no_sleep))
