"""Every process on every GPU, whether it all fits, and what does not. Pure.

Engines start before trainers: an engine takes its share of what it finds free, and a trainer takes what is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from refitd_plan.allocation import VLLM, Parallel, Role
from refitd_plan.job import JobSettings
from refitd_plan.machine import GIB, Machine
from refitd_plan.model import Model
from refitd_plan.placement import Placement, Rank
from refitd_plan.rank_memory import (
    STAGING,
    WEIGHT_BYTES,
    EngineMemory,
    MemoryPart,
    RankProcess,
    engine_memory,
    requests_at_once,
    trainer_parts,
)
from refitd_plan.transport import WeightTransport
from refitd_plan.vllm_memory import vllm_memory

GPU_HEADROOM = 0.05
"""The share of a GPU that stays free: a prediction can be wrong, and a GPU that is full fails at the next token."""

_STAGING_BYTES = 2 * 2**26
_BESIDE = {
    (WeightTransport.NCCL, "receiver"): 1.5,
    (WeightTransport.NCCL, "sender"): 2.5,
    (WeightTransport.GLOO, "receiver"): 0.5,
    (WeightTransport.GLOO, "sender"): 0.5,
}  # GiB
_MEASURED = "measured on an H200 (docs/measurements.md): a CUDA context, and NCCL's memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The processes, and why they do not fit: nothing where they do. `kv_tokens` is of the smallest KV cache."""

    processes: tuple[RankProcess, ...]
    faults: tuple[str, ...]
    kv_tokens: int
    kv_wanted: int
    fraction: float

    @property
    def fits(self) -> bool:
        """Whether every GPU holds its processes, with room to spare."""
        return not self.faults

    @property
    def peak(self) -> float:
        """What all processes take together, in GiB."""
        return sum(process.total for process in self.processes)


def memory_of(
    model: Model, placement: Placement, machine: Machine, job: JobSettings, transport: WeightTransport | None
) -> MemoryEstimate:
    """Every process's memory.

    Args:
        model: what is trained and served.
        placement: which rank is on which GPU.
        machine: the GPUs.
        job: the settings.
        transport: what refitd carries out; None where it carries out nothing. A publisher that looks for changes
            takes two chunks on rank 0's GPU, and a broadcast has a receiver beside each engine rank and a sender.
    """
    taken: dict[int, float] = {}
    engines: list[tuple[RankProcess, EngineMemory]] = []
    for rank in placement.of(Role.GENERATION):
        capacity = machine.memory(rank.gpu)
        free = capacity - taken.get(rank.gpu, 0.0)
        parallel = rank.component.parallel
        if rank.component.backend == VLLM:
            found = vllm_memory(model, parallel, job, capacity=capacity)
        else:
            found = engine_memory(model, parallel, job, capacity=capacity, free=free)
        process = _process(rank, (*found.parts, *_beside(transport, "receiver")))
        taken[rank.gpu] = taken.get(rank.gpu, 0.0) + process.total
        engines.append((process, found))
    trainers: list[RankProcess] = []
    for rank in placement.of(Role.TRAINING):
        parts = trainer_parts(model, rank.component, job)
        if rank.index == 0:
            parts += _beside(transport, "sender")
        if transport is WeightTransport.DISK_DELTA:
            parts += (MemoryPart(name="publish staging", size=_STAGING_BYTES / GIB, source=STAGING),)
        trainers.append(_process(rank, parts))
    processes = (*(process for process, _ in engines), *trainers)
    parallel = placement.of(Role.GENERATION)[0].component.parallel
    return MemoryEstimate(
        processes=processes,
        faults=(*_faults_of_engines(engines, job), *_faults_of_gpus(processes, machine)),
        kv_tokens=min(found.kv_tokens for _, found in engines),
        kv_wanted=requests_at_once(job, parallel) * job.sequence_tokens,
        fraction=engines[0][1].fraction,
    )


def received_of(model: Model, engine: Parallel, *, whole: bool) -> str:
    """What each receiver of a broadcast keeps, as a sentence. It is not among the parts: where the GPU has no room for
    it, it is in host memory.

    Args:
        model: what is served.
        engine: the engine's parallelism.
        whole: the trainer has one rank, which sends each receiver the whole version.
    """
    version = WEIGHT_BYTES * model.parameters / GIB
    share = version / (engine.t * engine.p)
    keeps = f"the whole version, {version:.1f} GiB"
    if not whole and share < version:
        keeps = f"what its engine rank loads, about {share:.1f} GiB, and {keeps}, until it is known what that is"
    return f"each receiver keeps {keeps}: on its GPU where that and 1 GiB are free, else in host memory"


def _beside(transport: WeightTransport | None, name: str) -> tuple[MemoryPart, ...]:
    """A process of refitd's beside a rank. A receiver's copy of the model is in host memory where there is no room."""
    size = 0.0 if transport is None else _BESIDE.get((transport, name), 0.0)
    return (MemoryPart(name=name, size=size, source=_MEASURED),) if size else ()


def _process(rank: Rank, parts: tuple[MemoryPart, ...]) -> RankProcess:
    return RankProcess(
        title=f"{rank.component.title} rank {rank.index}", role=rank.component.role, gpu=rank.gpu, parts=parts
    )


def _faults_of_engines(engines: list[tuple[RankProcess, EngineMemory]], job: JobSettings) -> Iterable[str]:
    process, found = min(engines, key=lambda pair: pair[1].kv_tokens)
    if found.kv_tokens < job.sequence_tokens:
        room = f"for {max(0, found.kv_tokens)} tokens" if found.kv_tokens > 0 else "for nothing beside the weights"
        yield (
            f"{process.title} on GPU {process.gpu}: mem_fraction_static {found.fraction:g} leaves room {room}, "
            f"and one sequence has {job.sequence_tokens}"
        )


def _faults_of_gpus(processes: tuple[RankProcess, ...], machine: Machine) -> Iterable[str]:
    sums: dict[int, float] = {}
    for process in processes:
        sums[process.gpu] = sums.get(process.gpu, 0.0) + process.total
    over = {gpu: total for gpu, total in sums.items() if total > usable(machine.memory(gpu))}
    if over:
        gpu, total = max(over.items(), key=lambda item: item[1])
        more = f" (and {len(over) - 1} more GPUs)" if len(over) > 1 else ""
        yield (
            f"GPU {gpu}{more} would hold {total:.1f} GiB, and has {machine.memory(gpu):.1f}, "
            f"of which {GPU_HEADROOM:.0%} is to stay free"
        )


def usable(capacity: float) -> float:
    """What may be filled of a GPU, in GiB."""
    return capacity * (1 - GPU_HEADROOM)
