"""Ranks of a trainer send what they have to the ranks of a TP=2 engine, and one that is killed or silent harms no one."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from refitd_client import ShardedPublisher
from refitd_client.contract.manifest import parse_manifest
from support import published
from support.mini_sglang import tiny_weights
from support.ranks import run_ranks
from support.sharded_trainer import RUN, ShardedJob, fill, fsdp2_weights, sharded_job

pytestmark = pytest.mark.timeout(300)

SECONDS = 120.0
SLICED = sum(
    tensor.nbytes * (1 if name in {"q.weight", "k.weight", "v.weight", "down.weight"} else 2)
    for name, tensor in tiny_weights(0).items()
)
"""Bytes that the engine's two ranks need together: halves of four tensors, and all of the others."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Generator[ShardedJob]:
    with sharded_job(tmp_path_factory.mktemp("sharded")) as made:
        yield made


def _publish(rank: int, size: int, root: Path, url: str, steps: list[int]) -> list[Any]:
    """The first step by files, the others over Gloo."""
    model, told = fsdp2_weights(steps[0], size), list[Any]()
    with ShardedPublisher(root, RUN, url, dtype="bfloat16") as publisher:
        for step in steps:
            fill(model, step)
            if step == steps[0]:
                publisher.publish(model, step=step).wait(SECONDS)
                continue
            publication = publisher.publish(model, step=step, transport="gloo")
            told.append((publication.version_id, publication.handed))
            publication.wait(SECONDS, "sealed")
    return told


def test_what_two_ranks_send_is_served_by_both_ranks_of_the_engine_before_its_files_are_there(
    job: ShardedJob, tmp_path: Path
) -> None:
    first, second = run_ranks(2, tmp_path, _publish, job.root, job.refitd.url, [1, 2, 3, 4], limit=SECONDS)
    assert isinstance(first, list), first
    assert first == second
    for step, (version, handed) in enumerate(first, 2):
        assert (version, handed.engines, handed.reason) == (f"run~v{step:06d}", (job.engine_id,), None)
        manifest = parse_manifest((job.root / RUN / f"v{step:06d}" / "refit.json").read_bytes())
        assert len(manifest.fingerprints) == manifest.tensors.count  # the service has held the files against them
        assert manifest.metadata["transport"] == "gloo"
    assert job.engine.holds(4)
    total = manifest.tensors.bytes
    sent = [handed.sent_bytes for _, handed in first]
    assert sent == [2 * total, SLICED, SLICED]  # it is not known before the first load how each rank loads
    assert published.leftovers(job.root / RUN) == []
