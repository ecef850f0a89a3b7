"""The GPUs that a job gets: what was said of the machine, and for the rest what the driver says.

What makes two of them the same is the UUID, never the ordinal or the bus id: ordinals differ with
`CUDA_VISIBLE_DEVICES`, and one driver reported a single bus id for several GPUs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refitd_client.errors import PlanRefusedError
from refitd_plan.faults import check_positive

GIB = 2**30
LEAST_MEMORY = 1.0  # GiB: less is a mistaken unit
MOST_MEMORY = 4096.0
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `memory` is what programs can have of it, in GiB. None is what was neither read nor given."""

    memory: float | None = None
    uuid: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of one node, and how many such nodes there are. `shared_files`: all see the same root."""

    gpus: tuple[Gpu, ...]
    nodes: int = 1
    shared_files: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no machine.

        Raises:
            PlanRefusedError: no GPUs, or a size that cannot be.
        """
        if not self.gpus:
            raise PlanRefusedError("there is no GPU: give --gpus-per-node and --gpu-memory of the job's machine")
        check_positive("--nodes", self.nodes, most=65_536)
        for gpu in self.gpus:
            if gpu.memory is not None:
                check_memory(gpu.memory)

    @property
    def count(self) -> int:
        """The GPUs of all nodes."""
        return len(self.gpus) * self.nodes

    def gpu(self, index: int) -> Gpu:
        """A GPU, counted over all nodes. Nodes are taken to be alike."""
        return self.gpus[index % len(self.gpus)]

    def memory(self, index: int) -> float:
        """The memory of a GPU, in GiB.

        Raises:
            PlanRefusedError: its memory was neither read nor given.
        """
        memory = self.gpu(index).memory
        if memory is None:
            raise PlanRefusedError("no GPU can be read here: give --gpu-memory, the GiB of one GPU")
        return memory

    def device(self, index: int) -> str:
        """What tells one GPU from another, over all nodes."""
        gpu, node = self.gpu(index), index // len(self.gpus)
        return f"node {node}/{gpu.uuid or f'GPU {index % len(self.gpus)}'}"


def check_memory(memory: float) -> None:
    """Refuse a GPU's memory that cannot be.

    Raises:
        PlanRefusedError: it is none.
    """
    if not isinstance(memory, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] - callers of plan() may
        raise PlanRefusedError(f"--gpu-memory is {memory!r}, which is no number")
    if not LEAST_MEMORY <= memory <= MOST_MEMORY:
        raise PlanRefusedError(
            f"--gpu-memory is {memory:g} GiB: a GPU has {LEAST_MEMORY:g} to {MOST_MEMORY:g} (GiB, so 80 and not 80000)"
        )


def machine_for(
    *,
    gpus_per_node: int | None,
    gpu_memory: float | None,
    nodes: int | None,
    shared_files: bool,
    read: Callable[[], Sequence[Gpu]],
) -> tuple[Machine, list[str]]:
    """The machine, and what is assumed of it.

    Args:
        gpus_per_node: GPUs of a node, None for those that are read.
        gpu_memory: GiB of one GPU, None for what is read.
        nodes: how many nodes there are, None for one.
        shared_files: whether trainer and engines see the same root.
        read: asks the driver; called only if a number is None.

    Raises:
        PlanRefusedError: a number cannot be, or the number of GPUs is not known.
    """
    check_positive("--gpus-per-node", gpus_per_node, most=_MOST_GPUS)
    check_positive("--nodes", nodes, most=65_536)
    seen = [] if gpus_per_node is not None and gpu_memory is not None else list(read())
    gpus, assumed = _gpus(gpus_per_node, gpu_memory, seen)
    if nodes is None:
        assumed.append("the job has one node")
    if any(gpu.uuid is None for gpu in gpus):
        assumed.append("the GPUs of a node are told apart by their number: no UUID was read")
    return Machine(gpus=gpus, nodes=nodes or 1, shared_files=shared_files), assumed


def _gpus(count: int | None, memory: float | None, seen: list[Gpu]) -> tuple[tuple[Gpu, ...], list[str]]:
    if not seen:
        if count is None:
            raise PlanRefusedError("no GPU can be read here: give --gpus-per-node and --gpu-memory")
        return (Gpu(memory=memory),) * count, []
    if count is None or count <= len(seen):
        own = tuple(seen[:count])
        known = own if memory is None else tuple(Gpu(memory=memory, uuid=gpu.uuid, name=gpu.name) for gpu in own)
        return known, []
    alike = f"the job's machine has {count} GPUs like the {len(seen)} that were read here"
    return (Gpu(memory=memory or min(gpu.memory or 0.0 for gpu in seen)),) * count, [alike]
