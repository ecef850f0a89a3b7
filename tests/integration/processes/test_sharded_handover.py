"""Ranks of a trainer lend their shards to a TP=2 engine on their host: from where they lie, or as copies."""

import os
import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import PublishError, RankLostError, Sharded, ShardedPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.sharded.lend_orders import LendOrder
from refitd_client.sharded.rank_lender import RankLender
from refitd_client.transport.ipc.shared import SHARED_MEMORY, SharedTensors
from support import published
from support.exporting import shared
from support.mini_sglang import tiny_weights
from support.ranks import attempted, run_ranks
from support.sharded_trainer import RUN, ShardedJob, fill, fsdp2_weights, sharded_job

pytestmark = pytest.mark.timeout(600)

SECONDS = 240.0
PARTS = {"q.weight": 0, "k.weight": 0, "embed.weight": 0, "down.weight": 1, "turned.weight": 1}
"""By which dimension two ranks have halves: of five rows and of six columns. Rank 1 has `v` alone, both have `norm`."""


@pytest.fixture
def job(tmp_path: Path) -> Generator[ShardedJob]:
    (tmp_path / "sharded").mkdir()
    with sharded_job(tmp_path / "sharded") as made:
        yield made


def _part(seed: int, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What a rank has of the weights of a seed."""
    found = tiny_weights(seed)
    for name, dim in PARTS.items():
        found[name] = found[name].chunk(size, dim)[rank].contiguous()
    if rank != size - 1:
        del found["v.weight"]
    return found


def _described(rank: int, size: int) -> dict[str, Sharded]:
    whole = tiny_weights(0)
    return {name: Sharded(dim, rank, size, whole[name].shape[dim]) for name, dim in PARTS.items()}


def _lend(rank: int, size: int, root: Path, url: str) -> list[Any]:
    """The first step by files, two from shared memory as the shards lie there, and two that were in float32."""
    described, told = _described(rank, size), list[Any]()
    with ExitStack() as ends, ShardedPublisher(root, RUN, url, dtype="bfloat16") as publisher:
        made = shared(_part(1, rank, size), SHARED_MEMORY)
        ends.callback(made.close)
        publisher.publish(made.tensors, step=1, sharded=described).wait(SECONDS)
        model = fsdp2_weights(1, size)
        for step in (2, 3, 4, 5):
            if step < 4:
                for name, tensor in _part(step, rank, size).items():
                    made.tensors[name].copy_(tensor)
                publication = publisher.publish(made.tensors, step=step, sharded=described, handover=True)
            else:
                fill(model, step)
                publication = publisher.publish(model, step=step, transport="handover")
            told.append((publication.version_id, publication.handed))
            publication.wait(SECONDS, "sealed")
    return told


def test_what_two_ranks_lend_is_served_by_both_ranks_of_the_engine_before_its_files_are_there(
    job: ShardedJob, tmp_path: Path
) -> None:
    first, second = run_ranks(2, tmp_path, _lend, job.root, job.refitd.url, limit=SECONDS)
    assert isinstance(first, list), first
    assert first == second
    for step, (version, handed) in enumerate(first, 2):
        assert (version, handed.engines, handed.reason) == (f"run~v{step:06d}", (job.engine_id,), None)
        assert (handed.transport, handed.sent_bytes) == ("handover", 0)
        manifest = parse_manifest((job.root / RUN / f"v{step:06d}" / "refit.json").read_bytes())
        assert len(manifest.fingerprints) == manifest.tensors.count  # the service has held the files against them
        assert manifest.metadata["transport"] == "handover"
    assert job.engine.holds(5)
    assert published.leftovers(job.root / RUN) == []
    assert list((job.root / RUN).glob(".lender-*")) == []
