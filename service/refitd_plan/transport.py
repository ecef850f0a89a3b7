"""Which way the weights go: a job in the words of the one chooser, `refitd_client.transport.choice`. Pure.

What the chooser cannot see is added here: adapters, AReaL's folders, roots that engines do not see, memory that cannot
be opened. `COSTS` are figures of docs/measurements.md, against which a test holds them. What a root on a tmpfs takes
of its host's memory follows from the way: the versions that are kept, the slots, the one that is being written, and
with deltas the copies that they are applied to and the one that the publisher compares with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.errors import PlanRefusedError
from refitd_client.transport import choice as chooser
from refitd_client.transport.choice import TrainerPlace
from refitd_client.ways import Choice, Transport
from refitd_plan.allocation import ENGINE_NAMES, SGLANG, VLLM, Allocation, Role
from refitd_plan.job import JobSettings
from refitd_plan.machine import LEAST_MEMORY, Machine, Placement, Rank

WAYS: tuple[Transport, ...] = ("disk", "delta", "handover", "nccl", "gloo")
BROADCASTS = frozenset({"nccl", "gloo"})
MEASURED_GB = 3.09
MEASURED = f"{MEASURED_GB:g} GB in bf16, trainer and engine on an H200 each, refitd inside the engine"
"""What all of them were measured on."""
_HUB = {"HF_HUB_OFFLINE": "1"}  # a path that is gone must fail, and never be looked for on the hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What of a job decides which way its weights can take.

    `places` are the trainer's ranks, `found` the ranks of engines that have refitd inside, `engine` the backend that
    generates. `areal`: the trainer is AReaL, which hands refitd the folders that it has written.
    """

    places: Sequence[TrainerPlace]
    found: Receivers
    engine: str
    shared_files: bool
    lora: bool
    areal: bool
    expandable_segments: bool


def situation_of(
    wanted: Allocation, placement: Placement, machine: Machine, job: JobSettings, *, plugin: bool, areal: bool
) -> Situation:
    """The situation of a job. `plugin`: refitd is in the engines' environment."""
    trainers = placement.of(Role.TRAINING)
    first = [rank for rank in trainers if rank.component is trainers[0].component]
    engines = placement.of(Role.GENERATION)
    return Situation(
        places=[
            TrainerPlace(
                host=_host(rank, machine),
                boot="",
                devices=frozenset({rank.device}),
                shared=False,
                backends=BROADCASTS,
                is_rank=len(first) > 1,
            )
            for rank in first
        ],
        found=Receivers(
            receivers=[_receiver(rank, machine) for rank in engines] if plugin else [],
            others=[] if plugin else sorted({rank.component.title for rank in engines}),
        ),
        engine=wanted.engine,
        shared_files=machine.shared_files,
        lora=job.lora_rank is not None,
        areal=areal,
        expandable_segments=job.expandable_segments,
    )


def _host(rank: Rank, machine: Machine) -> str:
    return f"node {rank.gpu // len(machine.gpus)}"


def _receiver(rank: Rank, machine: Machine) -> Receiver:
    return Receiver(
        engine=rank.component.title,
        rank=rank.index,
        name=f"{rank.component.title}-{rank.index}",
        host=_host(rank, machine),
        boot="",
        device=rank.device,
        backends=sorted(BROADCASTS),
    )


def hinders(way: Transport, now: Situation) -> str | None:
    """Why a way cannot be taken in this situation; None where it can."""
    if way == "disk":
        return None
    if now.lora:
        return "adapters go whole, by files"
    if now.areal:
        return "AReaL hands whole folders over, which refitd publishes in full"
    if way == "delta":
        return None
    if not now.shared_files:
        return "what goes from memory is announced by a file, and the engines do not see the trainer's files"
    if way == "handover" and now.expandable_segments:
        return "memory of expandable segments cannot be opened by CUDA IPC: leave expandable_segments out"
    return chooser.hinders(way, now.places, now.found)


def choose(now: Situation) -> Choice:
    """The way that `publish(transport="auto")` would take, and why."""
    if (no_delta := hinders("delta", now)) is not None:
        return Choice(transport="disk", why=f"files go everywhere; {no_delta}")
    choice = chooser.choose(now.places, now.found)
    if (why := hinders(choice.transport, now)) is None:
        return choice
    return Choice(transport="disk" if now.places[0].is_rank else "delta", why=f"files go everywhere ({why})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCost:
    """What one full version cost by a transport, in milliseconds, as docs/measurements.md has it.

    `answered`: from `publish()` until the engine generates by the new, proved weights. `held`: the trainer in
    `publish()`, with the files that follow. `paused`: the engine.
    """

    answered: int
    held: int
    paused: int


COSTS: Mapping[Transport, TransportCost] = {
    "disk": TransportCost(answered=242, held=64, paused=82),
    "delta": TransportCost(answered=150, held=15, paused=33),  # 1 % changed
    "handover": TransportCost(answered=52, held=116, paused=32),
    "nccl": TransportCost(answered=85, held=102, paused=35),
    "gloo": TransportCost(answered=677, held=687, paused=39),
}


def measured(version: float | None, engine: str = SGLANG, *, plugin: bool = True) -> str:
    """What the figures are of, and how a job compares.

    Args:
        version: the bytes of one of its versions, None where not known.
        engine: its backend.
        plugin: whether refitd is inside its engines.
    """
    of = MEASURED if engine == SGLANG else f"{MEASURED}, which was SGLang; not measured with {ENGINE_NAMES[engine]}"
    if not plugin:
        of = f"{of}, as it is not in this job: engines without it are paused for longer"
    if version is None:
        return of
    gigabytes = version / 1e9
    return f"{of}; a version of this job has {gigabytes:.3g} GB: about {gigabytes / MEASURED_GB:.2g} times that"


_OF_ENGINE: Mapping[str, Mapping[str, str]] = {SGLANG: {}, VLLM: {"VLLM_SERVER_DEV_MODE": "1"}}
# SGLang sets the first for its own processes; a trainer without it joins the group, and its first broadcast fails.
_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"}


def environment(transport: Transport, *, expandable_segments: bool, engine: str = SGLANG) -> dict[str, dict[str, str]]:
    of_both = _NCCL if transport == "nccl" else {}
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable_segments else {}
    return {"trainer": {**of_both, **segments}, "engine": {**_HUB, **of_both, **_OF_ENGINE[engine]}}


_ON_VLLM = "mem_fraction_static, in this plan, is vLLM's gpu_memory_utilization"
_ON_STOCK_VLLM = (
    "a stock vLLM is paused for as long as it reads the whole checkpoint, also where a delta was published; with "
    "refitd in its environment files are read before the pause, and deltas are written in place where vLLM leaves "
    "weights as they are loaded (docs/vllm.md)",
    "a stock vLLM of several ranks is not updated: install refitd in its environment",
)


OF_RANKS = (
    "the times are of a trainer of one process and an engine of one rank; from two ranks to a tensor-parallel engine "
    "of two on their GPUs full versions took 161 ms, deltas 157, hand-overs 54 (docs/measurements.md). "
    "transport='auto' takes no deltas from several ranks: say delta='auto'"
)
RECEIVED = (
    "each receiver of a broadcast keeps a version, or what its engine rank loads of it: on its GPU where that and "
    "1 GiB are free, else in host memory"
)
_PULLED = (
    "the engines do not see the trainer's files: a service on their host pulls the versions ('refitd serve --follow', "
    "docs/many-hosts.md), from the trainer's host or from an object store"
)
_XCCL = "AReaL's own broadcasts (weight_update_mode: xccl) become versions by 'refitd front' (docs/areal.md)"


def advice(transport: Transport, now: Situation) -> tuple[str, ...]:
    """What the job has to keep to, in sentences."""
    lines: list[str] = []
    if now.engine == VLLM:
        lines += [_ON_VLLM] if now.found.receivers else [_ON_VLLM, *_ON_STOCK_VLLM]
    if not now.shared_files:
        lines.append(_PULLED)
    if now.areal:
        lines.append(_XCCL)
    if transport == "nccl":
        lines.append("load NCCL in the training processes only: refitd's own processes make the group and broadcast")
    return tuple(lines)


_HEADROOM = 0.05  # stays free: a tmpfs takes no page that the kernel does not have, and the job needs memory as well
_MOST_HOST_MEMORY = 65_536.0
_KEPT_ON_ROOT, _SLOTS_ON_ROOT, _WRITTEN_ON_ROOT, _COPIES_ON_ROOT, _COMPARED_ON_ROOT = 3, 2, 1, 2, 1
_BY_FULL_FILES = _KEPT_ON_ROOT + _SLOTS_ON_ROOT + _WRITTEN_ON_ROOT
_FEWEST = 3  # versions that less is kept of: two in place of three, and no slots


def check_host(memory: object, nodes: int) -> None:
    """Refuse what cannot be the memory of the one host that a root on a tmpfs is on. None passes.

    Raises:
        PlanRefusedError: it is no such size, or the job lies on several hosts.
    """
    if memory is None:
        return
    if not isinstance(memory, int | float) or isinstance(memory, bool):
        raise PlanRefusedError(f"--host-memory is {memory!r}, which is no number")
    if not LEAST_MEMORY <= memory <= _MOST_HOST_MEMORY:
        raise PlanRefusedError(
            f"--host-memory is {memory:g} GiB: a host has {LEAST_MEMORY:g} to {_MOST_HOST_MEMORY:g} (GiB, so 512)"
        )
    if nodes > 1:
        raise PlanRefusedError(
            f"--host-memory is for a root on a tmpfs, which one node alone sees, and this job has {nodes}: leave it out"
        )


def versions_on_root(transport: Transport) -> int:
    return _BY_FULL_FILES + (_COPIES_ON_ROOT + _COMPARED_ON_ROOT if transport == "delta" else 0)


def on_root(transport: Transport) -> str:
    """The same in words."""
    deltas = f", {_COPIES_ON_ROOT} copies for deltas, {_COMPARED_ON_ROOT} that the publisher compares with"
    more = deltas if transport == "delta" else ""
    count = versions_on_root(transport)
    return f"{count} versions ({_KEPT_ON_ROOT} kept, {_SLOTS_ON_ROOT} slots, {_WRITTEN_ON_ROOT} being written{more})"


def host_fault(transport: Transport, version: float, has: float) -> str | None:
    """Why the root does not fit into the host's memory, and what takes less; None where it fits."""
    count, most = versions_on_root(transport), has * (1 - _HEADROOM)
    if count * version <= most:
        return None
    fewer = count - _FEWEST
    remedy = "'refitd serve --keep-last 2 --slots 0' takes" if fewer * version <= most else "and at least"
    return (
        f"a root on a tmpfs would hold {on_root(transport)} of {version:.1f} GiB, {count * version:.1f} GiB in all, "
        f"and the host has {has:g}, of which {_HEADROOM:.0%} is to stay free: {remedy} {fewer * version:.1f} GiB"
    )
