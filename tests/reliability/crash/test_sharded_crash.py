"""kill -9 of rank 0 at each of its changes to the file system: the version is there, whole, or not at all."""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from refitd_client import PublishOptions, RankLostError, WeightPublisher
from support import durable_effects, published
from support.ranks import run_ranks


def _weights(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((8, 4), float(step)), "b": torch.full((16, 4), -float(step))}


def _publish(rank: int, _: int, root: Path, number: int) -> str:
    with WeightPublisher(
        root, "run", ranks="all", options=PublishOptions(max_shard_bytes=256, rank_timeout=20)
    ) as publisher:
        publisher.publish(_weights(1), step=1)
        if rank == 0:
            durable_effects.on_each_effect(_killer(number))
        try:
            publisher.publish(_weights(2), step=2)
        except RankLostError as error:
            return str(error)
    return "published"


def _killer(number: int) -> Any:
    def act(count: int, name: str, original: Any, args: tuple[Any, ...]) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def test_kill_9_of_rank_0_at_every_file_system_step_leaves_a_whole_version_or_none(tmp_path: Path) -> None:
    """The other rank hears of it; the next trainer publishes the same step."""
    number, seen = 0, set[tuple[str, ...]]()
    while True:
        number += 1
        root = tmp_path / f"{number:03d}"
        killed, other = run_ranks(2, tmp_path, _publish, root, number)
        names = published.versions(root / "run")
        for name in names:
            published.check(root / "run" / name)
        seen.add(tuple(names))
        if killed is not None:
            break
        assert "rank 0 is gone" in other
        with WeightPublisher(root, "run") as publisher:
            after = publisher.publish(_weights(2), step=2)
        assert (published.tensors(after.path)["a"] == 2).all()
    assert (killed, other) == ("published", "published")
    assert seen == {("v000001",), ("v000001", "v000002")}
    assert number > 10
