"""The GPUs that a job gets.

What makes two of them the same is the UUID, never the ordinal or the bus id: ordinals differ with
`CUDA_VISIBLE_DEVICES`, and one driver reported a single bus id for several GPUs.
"""

from dataclasses import dataclass

from refitd_client.errors import PlanRefusedError
from refitd_client.planning.faults import positive

GIB = 2**30
LEAST_MEMORY = 1.0  # GiB: less is no GPU that anybody trains on, but a mistaken unit
MOST_MEMORY = 4096.0


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
        positive("--nodes", self.nodes, most=65_536)
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
            PlanRefusedError: nobody said what it has.
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
    if not isinstance(memory, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] - whoever calls plan() may
        raise PlanRefusedError(f"--gpu-memory is {memory!r}, which is no number")
    if not LEAST_MEMORY <= memory <= MOST_MEMORY:
        raise PlanRefusedError(
            f"--gpu-memory is {memory:g} GiB: a GPU has {LEAST_MEMORY:g} to {MOST_MEMORY:g} (GiB, so 80 and not 80000)"
        )
