"""One rank of `test_sharded_gpu.py`, under torchrun: for each case build, shard, publish twice; rank 0 saves what
gathering gives."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from refitd_client import ShardedPublisher


class Model(nn.Module):
    """An uneven embedding that takes several pinned buffers, layers that tensor parallelism splits, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30_001, 1024)
        self.up = nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024)
        self.register_buffer("scale", torch.randn(1024))


def _fsdp2(model: nn.Module, size: int) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cuda", (size,)))


def _hsdp(model: nn.Module, size: int) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cuda", (size, 1), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cuda", (size,))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


CASES: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp2-cast": _fsdp2,
    "hsdp": _hsdp,
    "tensor-parallel": _tensor_parallel,
    "replicated": lambda model, _: model,
}


def main(root: Path, cases: list[str]) -> None:
    """Publish each case into a folder of its own."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for case in cases:
        publish(case, root / case)
    distributed.destroy_process_group()


def publish(case: str, root: Path) -> None:
    """Publish a model twice, and save its gathered state dict."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CASES[case](Model(), distributed.get_world_size())
    dtype = torch.bfloat16 if case == "fsdp2-cast" else None
    with ShardedPublisher(root, "run", dtype=dtype, fingerprints=True, rank_timeout=60) as publisher:
        for step in (1, 2):
            publication = publisher.publish(model, step=step)
            if distributed.get_rank() == 0:
                sys.stdout.write(f"{case} step {step}: {publication.bytes / 1e6:.0f} MB {publication.timings}\n")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if distributed.get_rank() == 0:
        cast = {name: tensor.to(dtype) if dtype is not None else tensor for name, tensor in state.items()}
        torch.save(cast, root / "full.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
