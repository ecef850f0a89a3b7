"""The GPUs that a job gets: what was said of the machine, and for the rest what the driver says.

What makes two of them the same is the UUID, never the ordinal or the bus id: ordinals differ with
`CUDA_VISIBLE_DEVICES`, and one driver reported a single bus id for several GPUs.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import Allocation, Component, Role, check_positive

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


_INSTEAD = "give --gpus-per-node and --gpu-memory in its place"


@contextmanager
def opened() -> Generator[Any]:
    """NVML for as long as the context lasts; None where there is no NVIDIA driver, or no `nvidia-ml-py` to ask it.

    Raises:
        PlanRefusedError: there is a driver that does not answer (after an update, its library is of another release).
    """
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        yield None
        return
    nvml: Any = pynvml  # it has no annotations
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value not in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            raise PlanRefusedError(f"the NVIDIA driver does not answer ({error}): {_INSTEAD}") from error
        yield None  # nothing is wrong on a machine without GPUs
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where there is no NVIDIA driver, or no `nvidia-ml-py` to ask it.

    Raises:
        PlanRefusedError: there are GPUs and one of them cannot be read, or the driver does not say how many there are.
    """
    with opened() as nvml:
        if nvml is None:
            return ()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise PlanRefusedError(f"the driver does not say how many GPUs there are ({error}): {_INSTEAD}") from error
        return tuple(_gpu(nvml, index) for index in range(count))


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        try:  # the driver keeps some of the memory to itself: of an A40's 44.99 GiB, CUDA hands out 44.42
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            memory = int(found.total) - int(found.reserved)
        except (nvml.NVMLError, AttributeError):
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(memory=memory / GIB, uuid=_text(uuid), name=_text(name))
    except nvml.NVMLError as error:
        raise PlanRefusedError(f"GPU {index} cannot be read ({error}): {_INSTEAD}") from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# Which rank computes on which GPU, and who meets whom there. Pure.
#
# Groups take GPUs one after the other. A job that asks for more than there are begins again at the first, as AReaL's
# local launcher does: that is how trainer and engine of a `d1+d1` come to lie on the one GPU of a machine. Launchers
# for several nodes (Ray, Slurm) do not, so there such a job is refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process on one GPU. `gpu` counts over all nodes; `device` is the GPU's identity."""

    component: Component
    index: int
    gpu: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All ranks. `wrapped`: the job asks for more GPUs than there are, so that some are used twice."""

    ranks: tuple[Rank, ...]
    wrapped: bool

    def of(self, role: Role) -> list[Rank]:
        return [rank for rank in self.ranks if rank.component.role is role]


def place(allocation: Allocation, machine: Machine) -> Placement:
    """Give each rank its GPU.

    Raises:
        PlanRefusedError: a part of the job is larger than the machine, the whole of it is and the machine has several
            nodes, or an engine would be torn over nodes.
    """
    if machine.nodes > 1 and allocation.world > machine.count:
        raise PlanRefusedError(
            f"{allocation.text} asks for {allocation.world} GPUs, and {machine.nodes} nodes of {len(machine.gpus)} "
            f"have {machine.count}: launchers for several nodes put no two parts on one GPU. To share them, write '|'"
        )
    ranks: list[Rank] = []
    begin = 0
    for group in allocation.groups:
        for member in group:
            _check(member, begin, machine)
            ranks += [_rank(member, index, begin, machine) for index in range(member.parallel.world)]
        begin += group[0].parallel.world
    return Placement(ranks=tuple(ranks), wrapped=allocation.world > machine.count)


def _rank(member: Component, index: int, begin: int, machine: Machine) -> Rank:
    gpu = (begin + index) % machine.count
    return Rank(component=member, index=index, gpu=gpu, device=machine.device(gpu))


def _check(member: Component, begin: int, machine: Machine) -> None:
    parallel, per_node = member.parallel, len(machine.gpus)
    if parallel.world > machine.count:
        nodes = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
        raise PlanRefusedError(
            f"{member.title} ({parallel}) has {parallel.world} ranks, and the machine has {per_node} GPUs{nodes}: "
            "no GPU can hold two ranks of one component"
        )
    if member.role is Role.TRAINING:
        return
    size = parallel.t * parallel.p
    if size > per_node and size % per_node:
        raise PlanRefusedError(f"an engine of {size} GPUs (t·p) cannot be laid on nodes of {per_node} GPUs")
    if size <= per_node and any((begin + size * i) % per_node + size > per_node for i in range(parallel.d)):
        raise PlanRefusedError(f"engines of {size} GPUs (t·p) would be torn over nodes of {per_node} GPUs")
