"""Ranks of a trainer lend their shards to a TP=2 engine on their host: from where they lie, or as copies."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import PublishOptions, RankLostError, Sharded, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.transport.memory import SHARED_MEMORY
from refitd_client.transport.offer import HostPlace, piece_name
from support import published
from support.exporting import shared
from support.hubs import until
from support.mini_sglang import tiny_weights
from support.ranks import run_ranks
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
    with (
        ExitStack() as ends,
        WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16")) as publisher,
    ):
        made = shared(_part(1, rank, size), SHARED_MEMORY)
        ends.callback(made.close)
        publisher.publish(made.tensors, step=1, sharded=described).wait(SECONDS)
        model = fsdp2_weights(1, size)
        for step in (2, 3, 4, 5):
            if step < 4:
                for name, tensor in _part(step, rank, size).items():
                    made.tensors[name].copy_(tensor)
                publication = publisher.publish(made.tensors, step=step, sharded=described, transport="handover")
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


def _before(job: ShardedJob, copying: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Let something happen once, right before or after the copying of the engine's first rank, with what it copies."""
    loading = job.engine.members[0].engine.loading
    load, waiting = loading.load, [copying]

    def loads(call: Any, source: Any, **more: Any) -> Any:
        of_memory = hasattr(source, "opened")
        if of_memory and not after and waiting:
            waiting.pop()(source)
        done = load(call, source, **more)
        if of_memory and after and waiting:
            waiting.pop()(source)
        return done

    monkeypatch.setattr(loading, "load", loads)


def _lend_fsdp2(rank: int, size: int, root: Path, url: str, first: int, pids: Path) -> Any:
    """A step by files, and two that are lent. Ranks leave their pids."""
    (pids / f"{rank}").write_text(f"{os.getpid()}")
    model, told = fsdp2_weights(first, size), list[Any]()
    with WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16")) as publisher:
        publisher.publish(model, step=first).wait(SECONDS)
        for step in (first + 1, first + 2):
            fill(model, step)
            publication = publisher.publish(model, step=step, transport="handover")
            told.append(publication.handed)
            publication.wait(SECONDS)
    return told


@pytest.mark.parametrize("part", [0, 1])
def test_one_flipped_bit_in_one_rank_s_memory_is_refused_and_the_version_goes_by_its_files(
    job: ShardedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    def flip(source: Any) -> None:
        place = source.opened.pieces[piece_name("embed.weight", part)].place
        assert isinstance(place, HostPlace)
        with Path(place.path).open("r+b") as memory:
            memory.seek(place.offset)
            (byte,) = memory.read(1)
            memory.seek(place.offset)
            memory.write(bytes([byte ^ 1]))

    _before(job, flip, monkeypatch, after=False)
    args = job.root, job.refitd.url, 1, tmp_path
    first, second = run_ranks(2, tmp_path, _lend_fsdp2, *args, limit=SECONDS)
    assert isinstance(first, list), first
    assert first == second
    flipped, sound = first
    assert flipped.engines == ()
    assert "tensor embed.weight has fingerprint" in flipped.reason
    assert (sound.engines, sound.reason) == ((job.engine_id,), None)
    assert job.engine.holds(3)
    assert published.versions(job.root / RUN)[-2:] == ["v000002", "v000003"]


@pytest.mark.parametrize(("rank", "after"), [(1, False), (1, True), (0, True)])
def test_a_rank_that_is_killed_before_the_engine_is_done_leaves_the_engine_what_it_had(
    job: ShardedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, after: bool
) -> None:
    """Then ranks that begin anew go on."""

    def kill(source: Any) -> None:
        os.kill(int((tmp_path / f"{rank}").read_text()), signal.SIGKILL)
        while source.opened.is_there:  # until its last thread has ended
            os.sched_yield()

    _before(job, kill, monkeypatch, after=after)
    args = job.root, job.refitd.url, 1, tmp_path
    told = run_ranks(2, tmp_path, _lend_fsdp2, *args, limit=SECONDS)
    dead, lost = told[rank], told[1 - rank]
    assert isinstance(lost, RankLostError), lost
    assert (lost.rank, dead) == (rank, None)
    until(lambda: job.engine.holds(1), "the engine has what it had")
    assert published.versions(job.root / RUN) == ["v000001"]
    told, _ = run_ranks(2, tmp_path, _lend_fsdp2, job.root, job.refitd.url, 11, tmp_path, limit=SECONDS)
    assert [handed.engines for handed in told] == [(job.engine_id,)] * 2
    assert job.engine.holds(13)
    assert list((job.root / RUN).glob(".lender-*")) == []  # that of the dead one, too
