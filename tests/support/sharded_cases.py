"""Models sharded in every way that trainers shard, each with the state dict that gathering would give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refitd_client import Sharded

Weights = Any


@dataclass(frozen=True)
class Case:
    """How many ranks, what each passes to `publish`, and what one process would pass for the same version."""

    ranks: int
    local: Callable[[int, int], Weights]
    gathered: Callable[[], Weights]
    publisher: Mapping[str, Any] | None = None
    sharded: Callable[[int, int], Mapping[str, Sharded]] | None = None


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


class Model(nn.Module):
    """Uneven sizes, an embedding that is the head, a bias, a buffer, a scalar, a frozen half-precision weight."""

    _tied_weights_keys = ("lm_head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 7) for _ in range(2))
        self.up = nn.Linear(7, 3)
        self.lm_head = nn.Linear(10, 37, bias=False)
        self.register_buffer("scale", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for seed, weight in enumerate(self.parameters()):
                weight.copy_(numbers(*weight.shape, seed=seed))
            self.scale.copy_(numbers(5))
            self.count.fill_(7)
        self.lm_head.weight = self.embed.weight


def fsdp2(_: int, size: int) -> nn.Module:
    """Blocks and root sharded over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(_: int, size: int) -> nn.Module:
    """Two replicas, each sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Model(), mesh=mesh)


def compiled() -> nn.Module:
    """A model whose names begin with the compiler's mark."""
    return torch.compile(Model(), backend="eager")


def compiled_ddp(_: int, __: int) -> nn.Module:
    """As names come out of torch.compile within DDP."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(compiled())


class Mlp(nn.Module):
    """What tensor parallelism splits by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        with torch.no_grad():
            for seed, weight in enumerate(self.parameters()):
                weight.copy_(numbers(*weight.shape, seed=seed))


def fsdp2_and_tp(_: int, size: int) -> nn.Module:
    """Columns are `_StridedShard(0), Shard(0)`, rows `Shard(0), Shard(1)`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Mlp(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


PLAIN = {
    "even": (16, 6),
    "uneven": (7, 9),
    "few": (2, 3),
    "one": (1, 5),
    "line": (5,),
    "cube": (3, 5, 8),
    "wide": (3, 4 * 4096),
    "large": (600, 600),
}


def full_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of awkward shapes; `wide` has long rows, `large` is split where it is replicated."""
    return {name: numbers(*shape, dtype=dtype, seed=seed) for seed, (name, shape) in enumerate(PLAIN.items())}


def placed(*placements: Any, mesh_shape: tuple[int, ...] | None = None) -> Callable[[int, int], dict[str, Any]]:
    """The state dict distributed by placements; what has too few dimensions for them is replicated."""

    def local(_: int, size: int) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = init_device_mesh("cpu", mesh_shape or (size,))
        state: dict[str, Any] = {}
        for name, tensor in full_state().items():
            fits = all(getattr(each, "dim", 0) < tensor.ndim for each in placements)
            state[name] = distribute_tensor(tensor, mesh, placements if fits else [Replicate()] * len(placements))
        return state

    return local


def tensor_parallel_parts(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Plain parts, along either dimension, and one that all ranks have."""
    state = full_state()
    return {
        "even": state["even"].chunk(size, dim=0)[rank],
        "wide": state["wide"].chunk(size, dim=1)[rank],
        "uneven": state["uneven"].chunk(size, dim=0)[rank],
        "line": state["line"],
    }


def descriptions(rank: int, size: int) -> dict[str, Sharded]:
    """What the parts are."""
    return {
        "even": Sharded(0, rank, size),
        "wide": Sharded(1, rank, size),
        "uneven": Sharded(0, rank, size, size=7),
    }


def pipeline(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Each rank has layers of its own, and all have one in common."""
    state = full_state()
    own = {name: tensor for number, (name, tensor) in enumerate(state.items()) if number * size // len(state) == rank}
    return {**own, "large": state["large"]}


def gathered_pipeline() -> dict[str, torch.Tensor]:
    """In the order of the ranks."""
    state, found = full_state(), dict[str, torch.Tensor]()
    for rank in range(2):
        for name in pipeline(rank, 2):
            found.setdefault(name, state[name])
    return found


def cast_state() -> dict[str, torch.Tensor]:
    """As `dtype` below makes of it."""
    state = {name: tensor.bfloat16() for name, tensor in full_state().items()}
    return {**state, "line": full_state()["line"]}


def renamed_model() -> dict[str, torch.Tensor]:
    """In bf16, under other names, without what is left out."""
    state = Model().state_dict()
    del state["lm_head.weight"], state["count"]
    return {f"model.{name}": tensor.bfloat16() for name, tensor in state.items()}


def rename(name: str) -> str | None:
    """A trainer's own names to those of a hub."""
    return None if name == "count" else f"model.{name}"


def cases() -> dict[str, Case]:
    """All of them."""
    from torch.distributed.tensor import Replicate, Shard

    cast = {"dtype": {"line": torch.float32, "*": torch.bfloat16}}
    return {
        "fsdp2-2": Case(2, fsdp2, Model),
        "fsdp2-4": Case(4, fsdp2, Model),
        "fsdp2-files-4": Case(4, fsdp2, Model, {"max_shard_bytes": 300}),
        "fsdp2-renamed-2": Case(2, fsdp2, renamed_model, {"dtype": "bfloat16", "rename": rename}),
        "hsdp-4": Case(4, hsdp, Model),
        "fsdp2-tp-4": Case(4, fsdp2_and_tp, Mlp),
        "ddp-2": Case(2, compiled_ddp, Model),
        "shard0-2": Case(2, placed(Shard(0)), full_state),
        "shard0-4": Case(4, placed(Shard(0)), full_state, {"max_shard_bytes": 2000}),
        "shard0-cast-4": Case(4, placed(Shard(0)), cast_state, cast),
        "shard1-2": Case(2, placed(Shard(1)), full_state),
        "shard1-4": Case(4, placed(Shard(1)), full_state),
        "replicate-2": Case(2, placed(Replicate()), full_state),
        "replicate-cast-4": Case(4, placed(Replicate()), cast_state, cast),
        "mesh-shard00-4": Case(4, placed(Shard(0), Shard(0), mesh_shape=(2, 2)), full_state),
        "mesh-shard01-4": Case(4, placed(Shard(0), Shard(1), mesh_shape=(2, 2)), full_state),
        "mesh-shard10-4": Case(4, placed(Shard(1), Shard(0), mesh_shape=(2, 2)), full_state),
        "mesh-replicate-shard1-4": Case(4, placed(Replicate(), Shard(1), mesh_shape=(2, 2)), full_state),
        "parts-2": Case(
            2,
            tensor_parallel_parts,
            lambda: {name: full_state()[name] for name in ("even", "wide", "uneven", "line")},
            sharded=descriptions,
        ),
        "pipeline-2": Case(2, pipeline, gathered_pipeline),
    }
