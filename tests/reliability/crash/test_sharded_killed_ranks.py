"""kill -9 of one rank in the middle of a version: every other rank hears of it by the rank's number."""

import os
import signal
from pathlib import Path

import pytest

from refitd_client import PublishError, PublishOptions, RankLostError, WeightPublisher
from refitd_client.files import durable
from refitd_client.sharded import follower
from support import published, sharded_cases
from support.points import taken
from support.ranks import attempted, run_ranks

KILLED = [(1, "_open"), (1, "write_at"), (1, "sync"), (2, "_digest"), (0, "write_at"), (0, "rename")]


def _die(rank: int, size: int, root: Path, who: int, where: str) -> list[Exception | None]:
    model = sharded_cases.fsdp2(rank, size)
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=20))
    publisher.publish(model, step=1)
    if rank == who:
        place = next(place for place in (durable, follower, follower.Follower) if hasattr(place, where))
        setattr(place, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    errors = [attempted(lambda: publisher.publish(model, step=2)), attempted(lambda: publisher.publish(model, step=3))]
    publisher.close()
    return errors


def _go_on(rank: int, size: int, root: Path) -> None:
    with WeightPublisher(root, "run", ranks="all") as publisher:
        publisher.publish(sharded_cases.fsdp2(rank, size), step=2)


@pytest.mark.points
@pytest.mark.parametrize(("who", "where"), [*taken(KILLED)])
def test_a_rank_that_is_killed_in_mid_publish_ends_in_an_error_on_the_others_and_no_version(
    tmp_path: Path, who: int, where: str
) -> None:
    """The others say whom they miss, and do not go on without it; ranks that are started anew do."""
    run = tmp_path / "run"
    results = run_ranks(3, tmp_path, _die, tmp_path, who, where)
    assert results[who] is None
    for errors in (errors for rank, errors in enumerate(results) if rank != who):
        assert isinstance(errors[0], RankLostError), errors
        assert errors[0].rank == who
        assert f"rank {who} is gone" in str(errors[0])
        assert isinstance(errors[1], PublishError)
        assert "open another" in str(errors[1])
    assert published.whole(run) == ["v000001"]
    assert (published.leftovers(run) == []) == (who != 0)  # what rank 0 left the service finds, its lock being free
    assert run_ranks(2, tmp_path, _go_on, tmp_path) == [None, None]
    assert "v000002" in published.whole(run)[-1]
