"""Versions that several trainer ranks bring to an engine's memory alone, as `durable` says: they outlive the trainer
and the service, and a rollback goes to the newest one with files.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.states import EngineState
from support import published
from support.hubs import until
from support.ranks import attempted, run_ranks
from support.sharded_trainer import RUN, ShardedJob, fill, fsdp2_weights, sharded_job, until_slices_are_known

pytestmark = pytest.mark.timeout(600)

SECONDS = 240.0
LAST = 5


@pytest.fixture
def job(tmp_path: Path) -> Generator[ShardedJob]:
    (tmp_path / "sharded").mkdir()
    with sharded_job(tmp_path / "sharded") as made:
        yield made


def _publish(rank: int, size: int, root: Path, url: str) -> list[Any]:
    """The first step by files, which one of a hundred gets; the others over Gloo, at last in slices."""
    model, told = fsdp2_weights(1, size), list[Any]()
    with WeightPublisher(
        root, RUN, url, ranks="all", options=PublishOptions(dtype="bfloat16", durable="every=100")
    ) as publisher:
        publisher.publish(model, step=1).wait(SECONDS)
        for step in range(2, LAST + 1):
            fill(model, step)
            publication = publisher.publish(model, step=step, transport="gloo")
            committed = publication.committed()
            sealed = attempted(lambda committed=committed: committed.wait(5, "sealed"))
            told.append((publication.handed, committed.in_memory, committed.bytes, str(sealed)))
            if rank == 0:
                until_slices_are_known(url)
    return told


def test_versions_of_several_ranks_without_files_outlive_their_trainer_and_a_rollback_goes_to_one_with_files(
    job: ShardedJob, tmp_path: Path
) -> None:
    first, second = run_ranks(2, tmp_path, _publish, job.root, job.refitd.url, limit=SECONDS)
    assert isinstance(first, list), first
    assert first == second
    for handed, in_memory, nbytes, sealed in first:
        assert (handed.engines, handed.reason) == ((job.engine_id,), None)
        assert (in_memory, nbytes) == (True, 0)
        assert "is in the engines' memory alone, as durable says: it is never sealed" in sealed
    assert first[-1][0].sent_bytes < first[0][0].sent_bytes  # each rank has its slices alone
    assert published.versions(job.root / RUN) == ["v000001"]
    assert published.leftovers(job.root / RUN) == []
    job.refitd.kill()  # and the trainer's ranks have gone
    job.refitd.start()

    def engine() -> Any:
        return job.client.engines().items[0]

    until(lambda: engine().state is EngineState.IN_SYNC, "the engine is proved to be where it was")
    assert (engine().version, engine().in_memory) == (f"run~v{LAST:06d}", True)
    assert job.engine.holds(LAST)
    assert job.client.rollback(RUN).id == "run~v000001"
    until(lambda: engine().version == "run~v000001", "the engine has the version with files")
    assert job.engine.holds(1)
