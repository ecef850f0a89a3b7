"""Two ranks of a trainer that publish to a TP=2 engine of a few lines, which has refitd's plugin on both ranks.

The trainer's ranks, the service, and the processes that send and receive are real; those that receive are forked from
one that has imported torch. The engine's ranks are threads of the test's process.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refitd_client import RefitClient
from support.forked_group import forked_members
from support.hubs import until
from support.mini_sglang import tiny_weights
from support.plugged_mini import PluggedMini, plugged_mini
from support.servers import RefitdServer

RUN = "run"
QUICK = ("--probe-interval", "0.2", "--scan-interval", "0.2", "--settle", "0.05")


@dataclass
class ShardedJob:
    """The engine, and the service that follows the run for it."""

    root: Path
    engine: PluggedMini
    refitd: RefitdServer
    client: RefitClient

    @property
    def engine_id(self) -> str:
        (engine,) = self.client.engines().items
        return engine.id

    @property
    def receivers(self) -> list[int]:
        """The pids of the receivers that are there."""
        children = [rank.engine.preparing.receiver._child for rank in self.engine.members]
        return [child.pid for child in children if child is not None and child.is_running]


@contextmanager
def sharded_job(folder: Path) -> Generator[ShardedJob]:
    """On a root of its own."""
    root = folder / "root"
    root.mkdir()
    with (
        forked_members(),
        plugged_mini(root, 2) as engine,
        RefitdServer(folder, root, [engine.server.url], *QUICK, "--run", RUN) as refitd,
        RefitClient(refitd.url) as client,
    ):
        try:
            yield ShardedJob(root, engine, refitd, client)
        finally:
            for rank in engine.members:
                rank.engine.preparing.receiver.close()


def until_slices_are_known(url: str) -> None:
    """Wait until the service knows which slices each rank needs, as it does soon after the first load of a transfer.

    It asks the ranks at its next look; a version that is published before is sent to each as a whole.
    """
    with RefitClient(url) as client:
        until(lambda: all(each.needs for each in client.receivers(RUN).receivers), "the ranks say what they need")


class _Held(nn.Module):
    """One parameter, called `weight`."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


class _Trained(nn.Module):
    """A module for each of some names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.add_module(name.split(".")[0], _Held(value.float()))


def fsdp2_weights(seed: int, size: int) -> Any:
    """The engine's model as FSDP2 has it, sharded over all ranks, in float32: publish it with dtype bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_Trained(tiny_weights(seed)), mesh=init_device_mesh("cpu", (size,)))


def fill(model: Any, seed: int) -> None:
    """Give it the weights of another seed, in place: each rank its shards."""
    from torch.distributed.tensor import distribute_tensor

    state: dict[str, Any] = model.state_dict()
    with torch.no_grad():
        for name, value in tiny_weights(seed).items():
            part = distribute_tensor(value.float(), state[name].device_mesh, state[name].placements)
            state[name].to_local().copy_(part.to_local())
