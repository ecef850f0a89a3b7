"""Whether a job fits its GPUs, and how it could: the answer of the memory model as a plan gives it."""

from collections.abc import Sequence
from dataclasses import dataclass

from refitd_client.planning.changes import Change, applied, changes
from refitd_client.planning.engine import WEIGHT_BYTES
from refitd_client.planning.job import Job
from refitd_client.planning.machine import GIB, Machine
from refitd_client.planning.memory import HEADROOM, Memory, memory_of
from refitd_client.planning.model import Model, lora_parameters
from refitd_client.planning.parts import Process
from refitd_client.planning.placement import Placement
from refitd_client.planning.plan import PlannedChange, PlannedMemory, PlannedProcess
from refitd_client.planning.transport import Transport

KEPT_ON_ROOT = 6
"""Versions that lie on a root at a time by the service's defaults: three kept, two slots, one that is being written."""
COPIES = 2
"""Where there are deltas, two more: the copies that they are applied to (`refitd serve --copies`)."""


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


def planned_memory(found: Fit) -> PlannedMemory:
    """As a plan says it."""
    return PlannedMemory(
        fits=found.now.fits,
        faults=found.now.faults,
        processes=_processes(found.now),
        changes=None if found.changes is None else tuple(_change(change) for change in found.changes),
        after=_processes(found.then),
        kv_tokens=found.now.kv_tokens,
        kv_wanted=found.now.kv_wanted,
        host=round(_on_root(found.transport) * WEIGHT_BYTES * _published(found) / GIB, 2),
        sources=_sources((*found.now.processes, *found.then.processes)),
    )


def _on_root(transport: Transport) -> int:
    return KEPT_ON_ROOT + (COPIES if transport is Transport.DISK_DELTA else 0)


def _published(found: Fit) -> float:
    """Parameters of a version: the model's, or those of an adapter."""
    rank = found.job.lora_rank
    return found.model.parameters if rank is None else lora_parameters(found.model, rank)


def assumed_of_memory(transport: Transport) -> list[str]:
    """What every prediction of memory takes for granted."""
    copies = f", {COPIES} copies for deltas" if transport is Transport.DISK_DELTA else ""
    return [
        "engines start before trainers, on GPUs that nobody else uses",
        f"{HEADROOM:.0%} of each GPU stays free",
        "attention is fused: scores are not stored",
        f"on a tmpfs, the root takes host memory for {_on_root(transport)} versions "
        f"(3 kept, 2 slots, 1 being written{copies})",
        "a reference model, a critic or a reward model beside the trainer is not planned for",
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
