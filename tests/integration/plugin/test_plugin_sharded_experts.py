"""Two trainer ranks that send a mixture of experts over Gloo to a real SGLang: each has half of the experts, by name.

Of the other tensors each rank has the rows that FSDP2 gives it.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from refitd_client import PublishOptions, RankLostError, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import label_of
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.transport import child
from support import published, rogue_sender
from support.architectures import make
from support.jobs import TOKEN, Job, running, served_at, served_by
from support.plugged import PluggedSglang
from support.ranks import attempted, run_ranks

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

RUN = "sharded/experts"
SECONDS = 240.0
EXPERTS, SENDERS = 4, 2


def _part(model: Path, rank: int, size: int) -> dict[str, Any]:
    """What a rank has of a checkpoint, in float32: half of each layer's experts whole, and rows of all else."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, found = init_device_mesh("cpu", (size,)), dict[str, Any]()
    for name, tensor in load_file(model / "model.safetensors").items():
        if ".experts." not in name:
            found[name] = distribute_tensor(tensor.float(), mesh, [Shard(0)])
        elif int(name.split(".experts.")[1].split(".")[0]) * size // EXPERTS == rank:
            found[name] = tensor.float()
    return found


def _publish(rank: int, size: int, job: tuple[Path, str, str], models: list[Path], first: int) -> list[Any]:
    """Send the models in turn; what was handed, and what the engine serves before the files of it are there."""
    root, url, engine = job
    child.PROGRAM, told = rogue_sender.PROGRAM, list[Any]()
    with WeightPublisher(
        root, RUN, url, ranks="all", options=PublishOptions(token=TOKEN, dtype="bfloat16")
    ) as publisher:
        for step, model in enumerate(models, start=first):
            publication = publisher.publish(_part(model, rank, size), step=step, transport="gloo")
            served = None if rank else served_at(engine)
            publication.wait(SECONDS, "sealed")
            told.append((publication.handed, publication.version_id, served))
    return told


def _lose(rank: int, size: int, job: tuple[Path, str, str], model: Path, step: int) -> Exception | None:
    """Rank 1 is killed when its first block has gone out."""
    root, url, _ = job
    child.PROGRAM = rogue_sender.PROGRAM
    if rank == 1:
        os.environ[rogue_sender.VARIABLE] = "rank"
    publisher = WeightPublisher(root, RUN, url, ranks="all", options=PublishOptions(token=TOKEN, dtype="bfloat16"))
    error = attempted(lambda: publisher.publish(_part(model, rank, size), step=step, transport="gloo"))
    publisher.close()
    return error


class ExpertsJob:
    """A real SGLang on a mixture of experts, its service, and what it is by files of each of two checkpoints."""

    def __init__(self, job: Job, engine: PluggedSglang, models: list[Path]) -> None:
        self.job, self.engine, self.models = job, engine, models
        self.step, self.turn = 0, 0
        self.by_files: list[tuple[str, list[int]]] = []
        for self.turn, model in enumerate(models):
            self.step += 1
            job.serve(model, self.step)
            self.by_files.append(self.now())
        assert self.by_files[0][1] != self.by_files[1][1]

    def now(self) -> tuple[str, list[int]]:
        """SGLang's own checksum of its parameters, and what it answers."""
        return self.engine.checksum, served_by(self.engine).answer

    def ranks(self, folder: Path, work: Any, *args: Any) -> list[Any]:
        """What the trainer's ranks return."""
        where = self.job.root, self.job.refitd.url, self.engine.url
        return run_ranks(SENDERS, folder, work, where, *args, limit=SECONDS)

    def goes(self, folder: Path, *turns: int) -> list[int]:
        """Checkpoints are sent, each is served before its files are there, and stays when they are; the bytes sent."""
        first, second = self.ranks(folder, _publish, [self.models[turn] for turn in turns], self.step + 1)
        assert isinstance(first, list), first
        assert [each[:2] for each in first] == [each[:2] for each in second]
        for (handed, version_id, served), turn in zip(first, turns, strict=True):
            self.step, self.turn = self.step + 1, turn
            assert (handed.engines, handed.reason) == ((self.job.engine_now.id,), None)
            assert (served.label, served.answer) == (label_of(version_id), self.by_files[turn][1])
            version = self.job.client.version(version_id)
            assert (version.state, version.metadata["transport"]) == (VersionState.SEALED, "gloo")
            manifest = parse_manifest((self.job.root / RUN / version_id.split("~")[-1] / "refit.json").read_bytes())
            assert len(manifest.fingerprints) == manifest.tensors.count  # the service has held the files against them
            assert sum(".experts." in name for name in manifest.fingerprints) == 2 * 3 * EXPERTS
        assert self.now() == self.by_files[turns[-1]]
        assert published.leftovers(self.job.root / RUN) == []
        return [each[0].sent_bytes for each in first]


@pytest.fixture(scope="module")
def experts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[ExpertsJob]:
    folder = tmp_path_factory.mktemp("experts")
    pair = [make(folder / f"{seed}", "qwen3-moe", seed, models / "model_a") for seed in (1, 2)]
    root = folder / "root"
    (root / ".refitd").mkdir(parents=True)
    with (
        PluggedSglang(folder, pair[0], root=root, TORCHDYNAMO_DISABLE="1") as server,
        running(folder, server, "--run", RUN, root=root, run=RUN) as job,
    ):
        yield ExpertsJob(job, server, pair)


def test_experts_that_two_ranks_send_by_name_give_the_answers_and_the_parameters_of_a_load_by_files(
    experts: ExpertsJob, tmp_path: Path
) -> None:
    sent = experts.goes(tmp_path, 0, 1, 0)
    whole = sum(each.nbytes for each in load_file(experts.models[0] / "model.safetensors").values())
    assert sent == [whole] * 3  # each sender has sent its part, and neither what the other has


def test_a_rank_that_is_killed_in_the_middle_leaves_the_engine_as_it_was_and_ranks_that_begin_anew_go_on(
    experts: ExpertsJob, tmp_path: Path
) -> None:
    before, versions, mark = experts.now(), published.versions(experts.job.root / RUN), experts.job.now
    first, dead = experts.ranks(tmp_path, _lose, experts.models[1 - experts.turn], experts.step + 1)
    assert isinstance(first, RankLostError), first
    assert (first.rank, dead) == (1, None)
    assert experts.now() == before
    assert set(published.versions(experts.job.root / RUN)) <= set(versions)  # old ones may be collected meanwhile
    states = [e.data.get("state") for e in experts.job.events if e.seq > mark and e.kind == "engine"]
    assert EngineState.TAINTED not in states
    experts.goes(tmp_path, 1 - experts.turn)
