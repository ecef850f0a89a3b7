"""`plan()`: from an allocation, a machine, a model and settings to a plan.

Its only I/O is to read the configuration that is named, to ask the driver for GPUs that were not given, and to look
which packages are installed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import ENGINE_NAMES, SGLANG, VLLM, Allocation, Role, allocation_of_counts, parse
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
    Rule,
    Situation,
    WeightTransport,
    advice,
    carried_out,
    check_host,
    choose,
    environment,
    hinders,
    hinders_handover,
    left_to_trainer,
    may_work,
    measured,
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

    >>> refitd_client.plan("sglang.d1p1t1+d1p1t1", gpus_per_node=1, gpu_memory=44.42, model="/models/qwen2.5-0.5b")

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
        areal: the trainer is AReaL, which hands refitd the folders that it has written (`refitd areal`).
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
    now = _situation(
        wanted, placement, machine, job, plugin=has_plugin(wanted.engine) if plugin is None else plugin, areal=areal
    )
    rule = choose(now)
    check_host(host_memory, machine.nodes)
    shape, of_model = _model(model)
    assumptions = [*of_machine, *of_model]
    if placement.wrapped:
        assumptions.insert(
            0,
            f"{wanted.text} asks for {wanted.world} GPUs and there are {machine.count}: "
            "the rest begins again at the first, as AReaL's local launcher does",
        )
    if plugin is None and not now.plugin and hinders_handover(replace(now, plugin=True)) is None:
        engine = ENGINE_NAMES[wanted.engine]
        assumptions.append(
            f"{engine} has no plugin of refitd's: the two are not together in this environment (--plugin)"
        )
    if not now.whole and now.engine == SGLANG and not (now.lora or now.areal):
        assumptions.append(OF_RANKS)
    if rule.transport is WeightTransport.HANDOVER:
        assumptions.append("the service goes by --strategy all: engines that go in turns get the files")
    files = carried_out(rule.transport, now)
    if shape is not None:
        assumptions += [*of_job, *assumed_of_memory(rule.transport, host_memory, files=files)]
    if shape is not None and rule.transport in BROADCASTS and files:
        assumptions.append(RECEIVED)
    return _plan(wanted, placement, machine, job, now, rule, shape, host_memory, assumptions)


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
    rule: Rule,
    shape: Model | None,
    host_memory: float | None,
    assumptions: Sequence[str],
) -> Plan:
    by_refitd = carried_out(rule.transport, now)
    found = None if shape is None else fit(shape, placement, machine, job, rule.transport, by_refitd=by_refitd)
    then = job if found is None else found.job
    meanwhile = None  # the best that refitd does itself, where it does not do what is best
    if not by_refitd:
        own = (WeightTransport.DISK_DELTA, WeightTransport.DISK)
        meanwhile = next((transport for transport in own if carried_out(transport, now)), None)
    return Plan(
        allocation=wanted.text,
        transport=rule.transport,
        rule=rule.name,
        reason=rule.reason(now),
        update_group=now.group,
        meanwhile=meanwhile,
        ways=tuple(
            TransportOption(
                transport=transport,
                chosen=transport is rule.transport,
                hinders=hinders(transport, now),
                carried_out=carried_out(transport, now),
                left_to_trainer=left_to_trainer(transport, now) if hinders(transport, now) is None else None,
                costs_ms=asdict(COSTS[transport]),
                maybe=may_work(transport, now),
            )
            for transport in WeightTransport
        ),
        costs_of=measured(None if shape is None else version_bytes(shape, job), wanted.engine, plugin=now.plugin),
        memory=None if found is None else planned_memory(found, host_memory, files=by_refitd),
        environment=environment(rule.transport, expandable_segments=then.expandable_segments, engine=wanted.engine),
        advice=advice(rule.transport, now),
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


def _situation(
    wanted: Allocation, placement: Placement, machine: Machine, job: JobSettings, *, plugin: bool, areal: bool
) -> Situation:
    if job.lora_rank is not None and not machine.shared_files:
        raise PlanRefusedError(
            f"adapters reach {ENGINE_NAMES[wanted.engine]} by files alone, and the engines do not see the trainer's "
            "files: share a folder"
        )
    ranks = placement.ranks
    return Situation(
        group=wanted.generation_world + 1,
        doubled=placement.doubled,
        colocated=wanted.colocated,
        devices=len({rank.device for rank in ranks}),
        nodes=len({rank.gpu // len(machine.gpus) for rank in ranks}),
        whole=wanted.of(Role.TRAINING)[0].parallel.world == 1,
        shared_files=machine.shared_files,
        lora=job.lora_rank is not None,
        expandable_segments=job.expandable_segments,
        plugin=plugin,
        areal=areal,
        apart=len({rank.device for rank in ranks}) == len(ranks),
        engine=wanted.engine,
    )
