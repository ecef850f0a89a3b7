"""A delta's file is written and digested by several threads: it is what its manifest says."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract import manifest as digest
from refitd_client.contract.manifest import FileDigest, parse_manifest
from refitd_client.contract.states import Kind
from refitd_client.delta import read_delta, writer
from refitd_client.publish.options import DeltaRules
from support.stand_in_service import StandIn, make_engine, stand_in


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        yield service


def digest_of(data: bytes) -> str:
    found = FileDigest()
    found.update(data)
    return found.text


def test_a_delta_of_several_blocks_is_the_file_that_its_manifest_names(
    tmp_path: Path, service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK", 10_000)
    monkeypatch.setattr(writer, "_THREADS_FROM", 1)
    monkeypatch.setattr(writer, "lanes_for", lambda jobs: 4)
    state = {"w": np.zeros(100_000, np.float32)}
    with WeightPublisher(
        tmp_path, "run", service.url, options=PublishOptions(delta_rules=DeltaRules(threshold=1.0))
    ) as publisher:
        for step, changed in enumerate([0, 5000, 5100, 300, 90_000], 1):
            state["w"][:changed] += 1
            done = publisher.publish(state, step=step, transport="delta")
            service.engines = [make_engine(version=done.version_id, step=step, run="run")]
            if step > 1:
                assert done.kind is Kind.DELTA
                data = (done.path / "weights.refit-delta").read_bytes()
                claimed = parse_manifest((done.path / "refit.json").read_bytes()).files["weights.refit-delta"]
                assert (claimed.size, claimed.digest) == (len(data), digest_of(data))
                delta = read_delta(done.path / "weights.refit-delta")
                assert delta.changes["w"].values.view(np.float32).tolist() == state["w"][:changed].tolist()
