"""One rank of `test_sharded_gpu.py`, under torchrun: for each case build, shard, publish full versions, and a
full one and two deltas with each kind of shadow; rank 0 saves what gathering gives before and after each."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from refitd_client import PublishOptions, WeightPublisher

sys.path.insert(0, str(Path(__file__).parents[1]))

from refitd_client.publisher import RunPublisher
from support.handed_back import hand_back
from support.inside import in_rank


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


SHADOWS: tuple[Literal["gpu", "stream"], ...] = ("gpu", "stream")

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
        for shadow in SHADOWS:
            publish_deltas(case, root / case, shadow)
    distributed.destroy_process_group()


def publish(case: str, root: Path) -> None:
    """Publish a model three times, and save its gathered state dict."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CASES[case](Model(), distributed.get_world_size())
    dtype = torch.bfloat16 if case == "fsdp2-cast" else None
    with WeightPublisher(
        root, "run", ranks="all", options=PublishOptions(dtype=dtype, fingerprints=True, rank_timeout=60)
    ) as publisher:
        for step in (1, 2, 3):  # the last one into a slot
            publication = publisher.publish(model, step=step)
            if distributed.get_rank() == 0:
                sys.stdout.write(f"{case} step {step}: {publication.bytes / 1e6:.0f} MB {publication.timings}\n")
                if step == 2:
                    hand_back(root, publication.path.with_name("v000001"))
            distributed.barrier()
    save(model, dtype, root / "full.pt")


def publish_deltas(case: str, root: Path, shadow: Literal["gpu", "stream"]) -> None:
    """Publish a full version and deltas, the last of them with what changed in both steps, and save each state."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = CASES[case](Model(), distributed.get_world_size())
    dtype = torch.bfloat16 if case == "fsdp2-cast" else None
    with WeightPublisher(
        root, shadow, ranks="all", options=PublishOptions(dtype=dtype, shadow=shadow, rank_timeout=60)
    ) as publisher:
        if (lead := in_rank(publisher)._lead) is not None:
            assert isinstance(lead.publisher, RunPublisher)
            lead.publisher._context.deltas._ask_base = lambda: f"{shadow}~v000001"
        for step in (1, 2, 3):
            if step > 1:
                train(model, step)
            publication = publisher.publish(model, step=step, transport="delta")
            if publication.kind.value != ("full" if step == 1 else "delta"):
                raise RuntimeError(f"{case} step {step} is full: {publication.why_full}")
            save(model, dtype, root / f"{shadow}-{step}.pt")


def train(model: nn.Module, step: int) -> None:
    """Change about 1 % of the elements: which, depends on their values alone, so that replicas stay alike."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            bits = local.contiguous().view(torch.int32).to(torch.int64)
            local.copy_(torch.where(((bits >> 3) + step) % 100 == 0, local * 1.5, local))


def save(model: nn.Module, dtype: torch.dtype | None, path: Path) -> None:
    """Save the gathered state dict as it is published, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if distributed.get_rank() == 0:
        cast = {name: tensor.to(dtype) if dtype is not None else tensor for name, tensor in state.items()}
        torch.save(cast, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
