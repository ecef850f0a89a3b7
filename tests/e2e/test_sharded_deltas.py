"""Deltas of several trainer ranks on real processes: an engine has the weights that the ranks have together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.publish.options import DeltaRules
from support.delta_jobs import BOOST
from support.jobs import PATIENCE, RUN, TOKEN, running, served_at, served_by
from support.ranks import run_ranks
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 6


def _in_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _train(rank: int, size: int, root: Path, url: str, engine: str, model: Path, out: Path) -> list[Any]:
    """Matrices are cut by rows or by columns, the rest is on all ranks. Rank 0 saves what they have in the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = {name: tensor.clone() for name, tensor in _in_folder(model).items()}
    rules = DeltaRules(threshold=0.5, anchor_every=4)
    told = list[Any]()
    with WeightPublisher(
        root, RUN, url, ranks="all", options=PublishOptions(token=TOKEN, base_model=model, delta_rules=rules)
    ) as publisher:
        for step in range(1, STEPS + 1):
            chance = np.random.default_rng(step)
            for name in sorted(whole)[step % 3 :: 3]:
                flat = whole[name].view(-1)
                flat[chance.choice(len(flat), max(1, len(flat) // 50), replace=False)] += BOOST
            placements = {name: Replicate() if each.ndim < 2 else Shard(len(name) % 2) for name, each in whole.items()}
            state = {name: distribute_tensor(each, mesh, [placements[name]]) for name, each in whole.items()}
            publication = publisher.publish(state, step=step, transport="delta")
            publication.wait(timeout=PATIENCE)
            torch.distributed.barrier()
            if rank == 0:
                served = served_at(engine)
                told.append((publication.kind.value, served))
            torch.distributed.barrier()
    if rank == 0:
        save_file(whole, out / "model.safetensors", metadata={"format": "pt"})
    return told


def test_an_engine_answers_with_deltas_of_several_ranks_as_with_the_gathered_model_token_for_token(
    models: Path, tmp_path: Path
) -> None:
    """A full version, deltas, an anchor, deltas again."""
    model, whole = models / "model_a", tmp_path / "whole"
    whole.mkdir()
    for file in model.iterdir():
        if not file.name.endswith((".safetensors", ".index.json")):
            (whole / file.name).write_bytes(file.read_bytes())
    with EmbeddedServer(tmp_path, model) as engine, running(tmp_path, engine) as job:
        places = job.root, job.refitd.url, engine.url, model, whole
        told, other = run_ranks(2, tmp_path, _train, *places, limit=240)
        assert other == []
        assert [kind for kind, _ in told] == ["full", "delta", "delta", "delta", "full", "delta"], told
        assert [served.label for _, served in told] == [str(step) for step in range(1, STEPS + 1)]
        assert len({tuple(served.answer) for _, served in told}) > 1
        last = told[-1][1]
        loaded, trained = _in_folder(Path(last.path)), _in_folder(whole)
        assert loaded.keys() == trained.keys()
        assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    with EmbeddedServer(tmp_path, whole) as gathered:
        assert served_by(gathered).answer == last.answer
