"""`plan()`: from an allocation, a machine, a model and settings to a plan.

Its only I/O is to read the configuration that is named, to ask the driver for GPUs that were not given, and to look
which packages are installed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_client.ways import Choice
from refitd_plan.allocation import ENGINE_NAMES, SGLANG, VLLM, Allocation, allocation_of_counts, parse
from refitd_plan.fit import assumed_of_memory, fit, planned_memory, version_bytes
from refitd_plan.job import JobSettings, job_of
from refitd_plan.machine import Gpu, Machine, Placement, machine_for, place, read_gpus
from refitd_plan.model import Model, model_of, read_model
from refitd_plan.plan import Plan, TransportOption
from refitd_plan.transport import (
    BROADCASTS,
    COSTS,
    OF_RANKS,
    RECEIVED,
    WAYS,
    Situation,
    advice,
    check_host,
    choose,
    environment,
    hinders,
    measured,
    situation_of,
)

_PLUGIN_ENTRIES = {SGLANG: ("sglang.srt.plugins", "refitd_sglang"), VLLM: ("vllm.general_plugins", "refitd_vllm")}
ModelSource = str | os.PathLike[str] | Mapping[str, Any]


def plan(
    allocation: str | None = None,
    *,
    engine_gpus: int | None = None,
    trainer_gpus: int | None = None,
    engine_tp: int = 1,
    shared: bool = False,
    gpus_per_node: int | None = None,
    gpu_memory: float | None = None,
    nodes: int | None = None,
    host_memory: float | None = None,
    gpus: Sequence[Gpu] | None = None,
    shared_files: bool = True,
    plugin: bool | None = None,
    areal: bool = False,
    model: ModelSource | None = None,
    **settings: Any,
) -> Plan:
    """Plan how weights go from trainer to engines, and whether both fit on their GPUs.

    >>> plan("sglang.d1p1t1+d1p1t1", gpus_per_node=1, gpu_memory=44.42, model="/models/qwen2.5-0.5b")

    Args:
        allocation: an AReaL allocation string, of 2025 or of today; or else the counts that follow.
        engine_gpus: GPUs that generate, all engines together.
        trainer_gpus: GPUs that train (FSDP).
        engine_tp: GPUs of one engine (tensor parallelism).
        shared: trainer and engines get the same GPUs.
        gpus_per_node: GPUs of a node; else those that the driver names.
        gpu_memory: what programs can have of one GPU, in GiB; else what the driver says.
        nodes: nodes of the job (1).
        host_memory: GiB of the host's memory, where the root is on a tmpfs: what lies there has to fit as well.
        gpus: the GPUs of a node, with their UUIDs, in place of what the driver says.
        shared_files: whether trainer and engines see the same root.
        plugin: whether refitd is installed in the engines' environment; else whether this one has both.
        areal: the trainer is AReaL, which hands refitd the folders that it has written (`refitd front`).
        model: a model's folder, or its configuration. Without it no memory is planned.
        settings: of trainer and engine: the fields of `refitd_plan.job.JobSettings`.

    Raises:
        PlanRefusedError: what was given contradicts itself, the machine or the model's files, or does not suffice.
    """
    wanted = _allocation(allocation, engine_gpus, trainer_gpus, engine_tp, shared=shared)
    machine, of_machine = machine_for(
        gpus_per_node=gpus_per_node,
        gpu_memory=gpu_memory,
        nodes=nodes,
        shared_files=shared_files,
        read=read_gpus if gpus is None else lambda: gpus,
    )
    job, of_job = job_of(settings, wanted.engine)
    placement = place(wanted, machine)
    inside = has_plugin(wanted.engine) if plugin is None else plugin
    now = situation_of(wanted, placement, machine, job, plugin=inside, areal=areal)
    choice = choose(now)
    check_host(host_memory, machine.nodes)
    shape, of_model = _model(model)
    assumptions = [*of_machine, *of_model]
    if placement.wrapped:
        assumptions.insert(
            0,
            f"{wanted.text} asks for {wanted.world} GPUs and there are {machine.count}: "
            "the rest begins again at the first, as AReaL's local launcher does",
        )
    if plugin is None and not inside and not (now.lora or areal):
        engine = ENGINE_NAMES[wanted.engine]
        assumptions.append(
            f"{engine} has no plugin of refitd's: the two are not together in this environment (--plugin)"
        )
    if now.places[0].is_rank and now.engine == SGLANG and not (now.lora or now.areal):
        assumptions.append(OF_RANKS)
    if choice.transport == "handover":
        assumptions.append("the service goes by --strategy all: engines that go in turns get the files")
    if shape is not None:
        assumptions += [*of_job, *assumed_of_memory(choice.transport, host_memory)]
        assumptions += [RECEIVED] if choice.transport in BROADCASTS else []
    return _plan(wanted, placement, machine, job, now, choice, shape, host_memory, assumptions)


def has_plugin(engine: str = SGLANG) -> bool:
    """Whether the engine and refitd's plugin for it are installed together in this environment."""
    try:
        distribution(engine)
    except PackageNotFoundError:
        return False
    group, package = _PLUGIN_ENTRIES[engine]
    return any(point.module.startswith(package) for point in entry_points(group=group))


def _plan(
    wanted: Allocation,
    placement: Placement,
    machine: Machine,
    job: JobSettings,
    now: Situation,
    choice: Choice,
    shape: Model | None,
    host_memory: float | None,
    assumptions: Sequence[str],
) -> Plan:
    way = choice.transport
    found = None if shape is None else fit(shape, placement, machine, job, way)
    then = job if found is None else found.job
    version = None if shape is None else version_bytes(shape, job)
    return Plan(
        allocation=wanted.text,
        transport=way,
        reason=choice.why,
        ways=tuple(
            TransportOption(
                transport=each, chosen=each == way, hinders=hinders(each, now), costs_ms=asdict(COSTS[each])
            )
            for each in WAYS
        ),
        costs_of=measured(version, wanted.engine, plugin=bool(now.found.receivers)),
        memory=None if found is None else planned_memory(found, host_memory),
        environment=environment(way, expandable_segments=then.expandable_segments, engine=wanted.engine),
        advice=advice(way, now),
        assumptions=tuple(assumptions),
    )


def _allocation(
    text: str | None, engine_gpus: int | None, trainer_gpus: int | None, engine_tp: int, *, shared: bool
) -> Allocation:
    if text is not None:
        if engine_gpus is not None or trainer_gpus is not None:
            raise PlanRefusedError("an allocation string and counts of GPUs say the same thing twice: give one of them")
        return parse(text)
    if engine_gpus is None or trainer_gpus is None:
        raise PlanRefusedError(
            "the plan does not know which part of the job gets GPUs: give an allocation (sglang:d1|fsdp:d1), "
            "or --engine-gpus and --trainer-gpus"
        )
    return allocation_of_counts(engine_gpus, trainer_gpus, engine_tp=engine_tp, shared=shared)


def _model(source: ModelSource | None) -> tuple[Model | None, list[str]]:
    if source is None:
        return None, ["no model was given: memory is not planned"]
    if isinstance(source, Mapping):
        return model_of(source)
    return read_model(Path(source))
