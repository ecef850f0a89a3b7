"""Ranks of a trainer send what they have to the ranks of a TP=2 engine; one that is killed does no harm to the rest."""

import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from refitd_client import PublishOptions, RankLostError, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.sharded.export import RankExport
from refitd_client.sharded.follower import Follower
from refitd_client.transport.membership import WaitLimit, hear, join_store
from refitd_client.transport.script import Ready, key
from support import published
from support.forked import fork_server, forking_at
from support.forked_group import forked_members
from support.inside import in_rank
from support.mini_sglang import tiny_weights
from support.ranks import attempted, run_ranks
from support.sharded_trainer import RUN, ShardedJob, fill, fsdp2_weights, sharded_job, until_slices_are_known

pytestmark = pytest.mark.timeout(600)

SECONDS = 240.0
MOST_STEPS = 10
SLICED = sum(
    tensor.nbytes * (1 if name in {"q.weight", "k.weight", "v.weight", "down.weight"} else 2)
    for name, tensor in tiny_weights(0).items()
)
"""Bytes that the engine's two ranks need together: halves of four tensors, and all of the others."""


@pytest.fixture
def job(tmp_path: Path) -> Generator[ShardedJob]:
    (tmp_path / "sharded").mkdir()
    with sharded_job(tmp_path / "sharded") as made:
        yield made


def _publish(rank: int, size: int, root: Path, url: str, first: int) -> list[Any]:
    """The first step by files, the others over Gloo, until two in turn were sent in slices."""
    model, told = fsdp2_weights(first, size), list[Any]()
    with WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16")) as publisher:
        publisher.publish(model, step=first).wait(SECONDS)
        for step in range(first + 1, first + MOST_STEPS):
            fill(model, step)
            publication = publisher.publish(model, step=step, transport="gloo")
            told.append((publication.version_id, publication.handed))
            publication.wait(SECONDS, "sealed")
            if rank == 0:
                until_slices_are_known(url)
            if [handed.sent_bytes for _, handed in told[-2:]] == [SLICED, SLICED]:
                break
    return told


def test_what_two_ranks_send_is_served_by_both_ranks_of_the_engine_before_its_files_are_there(
    job: ShardedJob, tmp_path: Path
) -> None:
    first, second = run_ranks(2, tmp_path, _publish, job.root, job.refitd.url, 1, limit=SECONDS)
    assert isinstance(first, list), first
    assert first == second
    for step, (version, handed) in enumerate(first, 2):
        assert (version, handed.engines, handed.reason) == (f"run~v{step:06d}", (job.engine_id,), None)
        manifest = parse_manifest((job.root / RUN / f"v{step:06d}" / "refit.json").read_bytes())
        assert len(manifest.fingerprints) == manifest.tensors.count  # the service has held the files against them
        assert manifest.metadata["transport"] == "gloo"
    assert job.engine.holds(len(first) + 1)
    total = sum(tensor.nbytes for tensor in tiny_weights(0).values())
    sent = [handed.sent_bytes for _, handed in first]
    assert len(sent) > 2
    assert sent[-2:] == [SLICED, SLICED]  # it is not known before the first load how each rank loads
    assert set(sent[:-2]) == {2 * total}
    assert published.leftovers(job.root / RUN) == []


def _when_ready(sender: RankExport, order: Any, flag: Path, then: Callable[[], None]) -> None:
    """Begin to send. On rank 1 `then` is done when its process waits for the others; rank 0 begins when that has ended.

    `flag` tells rank 0 the pid of that process.
    """
    begin = RankExport.begin
    if sender.rank == 0:
        while not (flag.exists() and _has_ended(int(flag.read_text()))):
            time.sleep(0.01)
        begin(sender, order)
        return
    begin(sender, order)
    waiting, transfer = WaitLimit(SECONDS, lambda: False), order.transfer
    store = join_store(transfer.host, transfer.port, waiting)
    hear(store, key(transfer.name, "ready", "sender 1"), Ready, waiting)
    child = sender.sender._child
    assert child is not None
    flag.with_suffix(".new").write_text(f"{child.pid}")
    flag.with_suffix(".new").rename(flag)
    then()


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_a_sender(rank: int, size: int, root: Path, url: str, flag: Path, steps: list[int]) -> list[Any]:
    """The first step by files; in the second rank 1's sender is killed; the third is as it should be."""
    model, told = fsdp2_weights(steps[0], size), list[Any]()

    def kill(sender: RankExport) -> None:
        child = sender.sender._child
        assert child is not None
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    class Losing(RankExport):
        def begin(self, order: Any) -> None:
            _when_ready(self, order, flag, lambda: kill(self))

    with WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16")) as publisher:
        publisher.publish(model, step=steps[0]).wait(SECONDS)
        for step in steps[1:]:
            fill(model, step)
            in_rank(publisher)._follower.export.__class__ = Losing if step == steps[1] else RankExport
            publication = publisher.publish(model, step=step, transport="gloo")
            told.append(publication.handed)
            publication.wait(SECONDS)
    told.append([child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE])
    return told


def test_a_sender_that_is_killed_leaves_the_version_to_its_files_and_the_next_one_is_sent(
    job: ShardedJob, tmp_path: Path
) -> None:
    args = job.root, job.refitd.url, tmp_path / "killed", [21, 22, 23]
    for told in run_ranks(2, tmp_path, _lose_a_sender, *args, limit=SECONDS):
        assert isinstance(told, list), told
        lost, sent, left = told
        assert lost.engines == ()
        assert "nothing was sent" in lost.reason
        assert (sent.engines, sent.reason) == ((job.engine_id,), None)
        assert left == []  # no process is left behind
    assert job.engine.holds(23)
    assert (job.root / RUN / "v000022" / "refit.json").exists()  # its files have followed, and were served


def _lose_a_rank(rank: int, size: int, root: Path, url: str, flag: Path, when: str, steps: list[int]) -> Any:
    """Rank 1 is killed while all wait for one another, or when engines have the version and its files are written."""
    model = fsdp2_weights(steps[0], size)

    class Dying(RankExport):
        def begin(self, order: Any) -> None:
            _when_ready(self, order, flag, _die)

    publisher = WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16"))
    publisher.publish(model, step=steps[0]).wait(SECONDS)
    fill(model, steps[1])
    if when == "sending":
        in_rank(publisher)._follower.export.__class__ = Dying
    elif rank == 1:
        Follower._write = lambda *_: _die()  # pyright: ignore[reportAttributeAccessIssue]
    error = attempted(lambda: publisher.publish(model, step=steps[1], transport="gloo"))
    publisher.close()
    return error


def _with_forked_senders(rank: int, size: int, server: str, job: Callable[..., Any], *args: Any) -> Any:
    """Do `job` on a rank whose process that sends is forked: each publisher begins one, which would import torch anew.

    The tests above have those with an interpreter of their own.
    """
    with forking_at(server), forked_members():
        return job(rank, size, *args)


@pytest.mark.parametrize(("when", "holds", "steps"), [("sending", 31, [31, 32, 33]), ("writing", 42, [41, 42, 43])])
def test_a_trainer_rank_that_is_killed_is_named_and_ranks_that_begin_anew_go_on(
    job: ShardedJob, tmp_path: Path, when: str, holds: int, steps: list[int]
) -> None:
    """The engine has what it had, or the whole version, if all had arrived."""
    server, flag = fork_server(), tmp_path / "killed"
    args = server, _lose_a_rank, job.root, job.refitd.url, flag, when, steps
    first, dead = run_ranks(2, tmp_path, _with_forked_senders, *args, limit=SECONDS)
    assert isinstance(first, RankLostError), first
    assert dead is None
    assert first.rank == 1
    assert job.engine.holds(holds)
    assert published.versions(job.root / RUN)[-1] == f"v{steps[0]:06d}"
    args = server, _publish, job.root, job.refitd.url, steps[2]
    told, _ = run_ranks(2, tmp_path, _with_forked_senders, *args, limit=SECONDS)
    assert {handed.engines for _, handed in told} == {(job.engine_id,)}
    assert job.engine.holds(steps[2] + len(told))
