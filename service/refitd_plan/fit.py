"""Whether a job fits its GPUs, and how it could: the answer of the memory model as a plan gives it."""

from collections.abc import Sequence
from dataclasses import dataclass

from refitd_plan.changes import Change, applied, changes
from refitd_plan.engine import WEIGHT_BYTES
from refitd_plan.host import Host, host_memory, on_root
from refitd_plan.job import Job
from refitd_plan.machine import GIB, Machine
from refitd_plan.memory import HEADROOM, Memory, memory_of
from refitd_plan.model import Model, lora_parameters
from refitd_plan.parts import Process
from refitd_plan.placement import Placement
from refitd_plan.plan import PlannedChange, PlannedMemory, PlannedProcess
from refitd_plan.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The job as it is asked for, and with the changes that make it fit (the same where none do, or none have to)."""

    model: Model
    transport: Transport
    now: Memory
    changes: tuple[Change, ...] | None
    job: Job
    then: Memory


def fit(model: Model, placement: Placement, machine: Machine, job: Job, transport: Transport) -> Fit:
    """Find out. Deltas take a little memory; a hand-over excludes one of the changes."""

    def measure(job: Job) -> Memory:
        return memory_of(model, placement, machine, job, delta=transport is Transport.DISK_DELTA)

    found = changes(job, measure, handover=transport is Transport.HANDOVER)
    then = applied(job, found or ())
    return Fit(model=model, transport=transport, now=measure(job), changes=found, job=then, then=measure(then))


def planned_memory(found: Fit, host_has: float | None) -> PlannedMemory:
    """As a plan says it. `host_has` is the host's memory in GiB, None where nobody said it."""
    host = host_memory(found.transport, version_bytes(found.model, found.job) / GIB, host_has)
    return PlannedMemory(
        fits=found.now.fits and host.fault is None,
        faults=found.now.faults if host.fault is None else (*found.now.faults, host.fault),
        processes=_processes(found.now),
        changes=_changes(found.changes, host),
        after=_processes(found.then),
        kv_tokens=found.now.kv_tokens,
        kv_wanted=found.now.kv_wanted,
        host=round(host.needs, 2),
        host_has=host.has,
        sources=_sources((*found.now.processes, *found.then.processes)),
    )


def _changes(of_gpus: tuple[Change, ...] | None, host: Host) -> tuple[PlannedChange, ...] | None:
    if of_gpus is None or host.changes is None:
        return None
    return (*map(_change, of_gpus), *host.changes)


def version_bytes(model: Model, job: Job) -> float:
    """The size of a version: of the model in bf16, or of an adapter."""
    parameters = model.parameters if job.lora_rank is None else lora_parameters(model, job.lora_rank)
    return WEIGHT_BYTES * parameters


def assumed_of_memory(transport: Transport, host_has: float | None) -> list[str]:
    """What every prediction of memory takes for granted."""
    unknown = "" if host_has is not None else ", which nobody has said the size of (--host-memory)"
    return [
        "engines start before trainers, on GPUs that nobody else uses",
        f"{HEADROOM:.0%} of each GPU stays free",
        "attention is fused: scores are not stored",
        f"with a root on a tmpfs the host's memory holds {on_root(transport)}{unknown}",
        "a critic or a reward model beside the trainer is not planned for",
    ]


def _sources(processes: Sequence[Process]) -> dict[str, dict[str, str]]:
    by_role: dict[str, dict[str, str]] = {}
    for process in processes:
        by_role.setdefault(process.role, {}).update({part.name: part.source for part in process.parts})
    return by_role


def _processes(memory: Memory) -> tuple[PlannedProcess, ...]:
    return tuple(_process(process) for process in memory.processes)


def _process(process: Process) -> PlannedProcess:
    parts = {part.name: round(part.size, 3) for part in process.parts}
    return PlannedProcess(
        process=process.title, role=process.role, gpu=process.gpu, total=round(process.total, 2), parts=parts
    )


def _change(change: Change) -> PlannedChange:
    return PlannedChange(setting=change.setting, value=change.value, saves=round(change.saves, 2), costs=change.costs)
