"""The transports that bring weights from trainer to engines: what hinders each, which is chosen, what it costs. Pure.

disk         files on a root that both see; refitd's own, and the one that needs nothing else
disk+delta   the same, and only what changed where little did
handover     on one GPU: the engine opens the trainer's tensors by CUDA IPC, and the files follow
nccl         a broadcast over a process group of trainer rank 0 and all engine ranks, and the files follow; without
             refitd inside the engines it is the trainer's own
gloo         the same through host memory, where neither files nor NCCL can be had

`RULES` is a table of named rules: the first that applies chooses. `COSTS` are figures of docs/measurements.md, against
which a test holds them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import ENGINE_NAMES, SGLANG, VLLM
from refitd_plan.machine import LEAST_MEMORY

_FOLDERS = "AReaL hands whole folders over, which refitd publishes in full"
_AREALS_OWN = "AReaL broadcasts itself (weight_update_mode: xccl), and 'refitd areal' receives that for the engines"
MEASURED_GB = 3.09
MEASURED = f"{MEASURED_GB:g} GB in bf16, trainer and engine on an H200 each, refitd inside the engine"
"""What all of them were measured on."""
_BETWEEN_GPUS = "it works where one can read the other, which the first publish(transport='handover') finds out"
_HUB = {"HF_HUB_OFFLINE": "1"}  # a path that is gone must fail, and never be looked for on the hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What of a job decides which transport its weights can take: the rules look at nothing else.

    `group` is the size of the update group; `doubled` the device that two of its ranks are on, None where none is;
    `devices` the number of devices in the job; `nodes` those that hold any of it; `whole`: the trainer has one rank,
    which holds every tensor whole; `plugin`: refitd is in the engines' environment; `apart`: each rank of trainer and
    engines has a GPU of its own; `areal`: the trainer is AReaL, which hands refitd the folders that it has written;
    `engine`: the backend that generates.
    """

    group: int
    doubled: str | None
    colocated: bool
    devices: int
    nodes: int
    whole: bool
    shared_files: bool
    lora: bool
    expandable_segments: bool
    plugin: bool
    areal: bool = False
    apart: bool = True
    engine: str = SGLANG

    @property
    def engine_name(self) -> str:
        """What people call the engine."""
        return ENGINE_NAMES[self.engine]


class WeightTransport(StrEnum):
    """A transport, as the module describes it."""

    DISK = "disk"
    DISK_DELTA = "disk+delta"
    HANDOVER = "handover"
    NCCL = "nccl"
    GLOO = "gloo"


def no_broadcast(now: Situation) -> str | None:
    """Why NCCL cannot broadcast; None where it can. Outside the update group ranks may share GPUs."""
    if now.lora:
        return f"{now.engine_name} takes adapters from files alone"
    if now.doubled is not None:
        return (
            f"the update group would have {now.group} ranks, and two of them are on {now.doubled}: "
            "NCCL refuses that (Duplicate GPU detected)"
        )
    return "trainer and engines are colocated" if now.colocated else None


def hinders_handover(now: Situation) -> str | None:
    """Why the trainer's tensors cannot be handed over; None where they can."""
    if not now.shared_files:
        return "the engines do not see the trainer's files: what is handed over is offered by one, and its files follow"
    if now.nodes > 1:
        return "it needs one host, and the job lies on several"
    if now.areal:
        return _FOLDERS
    if not now.plugin:
        return "it needs refitd's plugin inside the engine (say --plugin where it is)"
    if now.devices > 1:
        return f"the job lies on {now.devices} GPUs: {_BETWEEN_GPUS}"
    if now.lora:
        return "adapters go by disk"
    if now.expandable_segments:
        return "memory of expandable segments cannot be opened by CUDA IPC: leave expandable_segments out"
    return None


def may_work(transport: WeightTransport, now: Situation) -> bool:
    """Whether a transport that is hindered may work all the same: no plan can see what hinders it, a trial does."""
    if transport is not WeightTransport.HANDOVER or hinders_handover(now) is None:
        return False
    return hinders_handover(replace(now, devices=1)) is None


def no_deltas(now: Situation) -> str | None:
    """Why what changed cannot be published alone; None where it can."""
    if now.lora:
        return "adapters are small: they go whole"
    return _FOLDERS if now.areal else None


def hinders(transport: WeightTransport, now: Situation) -> str | None:
    """Why a transport cannot be used in this situation; None where it can."""
    match transport:
        case WeightTransport.DISK:
            return None if now.shared_files else "the engines do not see the trainer's files"
        case WeightTransport.DISK_DELTA:
            return no_deltas(now) if now.shared_files else "the engines do not see the trainer's files"
        case WeightTransport.HANDOVER:
            return hinders_handover(now)
        case WeightTransport.NCCL:
            return no_broadcast(now)
        case WeightTransport.GLOO:
            return f"{now.engine_name} takes adapters from files alone" if now.lora else None
        case _:
            assert_never(transport)


BROADCASTS = frozenset({WeightTransport.NCCL, WeightTransport.GLOO})


def left_to_trainer(transport: WeightTransport, now: Situation) -> str | None:
    """Why refitd leaves a broadcast to the trainer; None where refitd does it, and for what is no broadcast."""
    if transport not in BROADCASTS:
        return None
    if now.areal:
        return _AREALS_OWN
    if not now.plugin:
        return "refitd is not inside the engines (say --plugin where it is)"
    if not now.shared_files:
        return "what is broadcast is announced by a file, and the engines do not see the trainer's files"
    if transport is WeightTransport.NCCL and not (now.whole or now.apart):
        return "each rank of the trainer sends its part, and some rank shares a GPU with another"
    return None


def carried_out(transport: WeightTransport, now: Situation) -> bool:
    """Whether refitd does it itself in this situation."""
    return hinders(transport, now) is None and left_to_trainer(transport, now) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: it chooses `transport` where `applies`."""

    name: str
    transport: WeightTransport
    applies: Callable[[Situation], bool]
    reason: Callable[[Situation], str]


RULES: tuple[Rule, ...] = (
    Rule(
        name="no-shared-files-one-device",
        transport=WeightTransport.GLOO,
        applies=lambda now: not now.shared_files and no_broadcast(now) is not None,
        reason=lambda now: f"the engines do not see the trainer's files, and {no_broadcast(now)}",
    ),
    Rule(
        name="no-shared-files",
        transport=WeightTransport.NCCL,
        applies=lambda now: not now.shared_files,
        reason=lambda _: (
            "the engines do not see the trainer's files, and each rank of the update group has a GPU of its own"
        ),
    ),
    Rule(
        name="lora",
        transport=WeightTransport.DISK,
        applies=lambda now: now.lora,
        reason=lambda _: "an adapter is small: its files cost less than any process group",
    ),
    Rule(
        name="hand-over",
        transport=WeightTransport.HANDOVER,
        applies=lambda now: hinders_handover(now) is None,
        reason=lambda now: f"{no_broadcast(now)}; the engine can open the trainer's tensors where they are",
    ),
    Rule(
        name="in-full",
        transport=WeightTransport.DISK,
        applies=lambda now: no_broadcast(now) is not None and no_deltas(now) is not None,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere; {no_deltas(now)}",
    ),
    Rule(
        name="colocated",
        transport=WeightTransport.DISK_DELTA,
        applies=lambda now: now.colocated,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere",
    ),
    Rule(
        name="duplicate-device",
        transport=WeightTransport.DISK_DELTA,
        applies=lambda now: no_broadcast(now) is not None,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere",
    ),
    Rule(
        name="separate-devices",
        transport=WeightTransport.NCCL,
        applies=lambda now: now.devices > 1,
        reason=lambda now: f"each of the {now.group} ranks of the update group has a GPU of its own",
    ),
)


def choose(now: Situation) -> Rule:
    """The first rule that applies. One always does: on one device alone, two ranks of the update group share it."""
    return next(rule for rule in RULES if rule.applies(now))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCost:
    """What one full version cost by a transport, in milliseconds, as docs/measurements.md has it.

    `answered`: from `publish()` until the engine generates by the new, proved weights. `held`: the trainer in
    `publish()`, with the files that follow. `paused`: the engine.
    """

    answered: int
    held: int
    paused: int


COSTS: Mapping[WeightTransport, TransportCost] = {
    WeightTransport.DISK: TransportCost(answered=242, held=64, paused=82),
    WeightTransport.DISK_DELTA: TransportCost(answered=150, held=15, paused=33),  # 1 % changed
    WeightTransport.HANDOVER: TransportCost(answered=52, held=116, paused=32),
    WeightTransport.NCCL: TransportCost(answered=85, held=102, paused=35),
    WeightTransport.GLOO: TransportCost(answered=677, held=687, paused=39),
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


# SGLang sets the first for its own processes; a trainer without it joins the group, and its first broadcast fails.
_OF_ENGINE: Mapping[str, Mapping[str, str]] = {SGLANG: {}, VLLM: {"VLLM_SERVER_DEV_MODE": "1"}}
_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"}


def environment(
    transport: WeightTransport, *, expandable_segments: bool, engine: str = SGLANG
) -> dict[str, dict[str, str]]:
    """The variables that trainer and engine need, by who needs them."""
    of_both = _NCCL if transport is WeightTransport.NCCL else {}
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


def _for_facades(transport: WeightTransport, now: Situation) -> str:
    """What 'refitd areal' needs to receive AReaL's broadcasts."""
    if transport is WeightTransport.GLOO:
        return (
            "AReaL takes Gloo only where it has no GPU: let the trainer and 'refitd areal' see one folder, and "
            "set actor.weight_update_mode to disk"
        )
    return (
        f"run 'refitd areal' where it sees {now.group - 1} GPUs, a GPU for each rank of the engines and none of the "
        "trainer's (CUDA_VISIBLE_DEVICES); the service and the engines see the root that it writes to (docs/areal.md)"
    )


def advice(transport: WeightTransport, now: Situation) -> tuple[str, ...]:
    """What the job has to keep to, in sentences."""
    of_engine: tuple[str, ...] = ()
    if now.engine == VLLM:
        of_engine = (_ON_VLLM,) if now.plugin else (_ON_VLLM, *_ON_STOCK_VLLM)
    if transport in BROADCASTS and carried_out(transport, now):
        return (
            *of_engine,
            f'publish(..., transport="{transport}"): refitd\'s own processes make the group and broadcast',
        )
    if now.areal and transport in BROADCASTS:
        of_engine = (*of_engine, _for_facades(transport, now))
    if transport is not WeightTransport.NCCL:
        return of_engine
    return (
        *of_engine,
        "load NCCL in the training processes only: a controller that makes no step joins no group and imports none",
        "keep NCCL_DEBUG=INFO out of production: it writes a line for every operation",
    )


# What a job takes of its host's memory where the root is on a tmpfs, and whether it is there. Pure.
#
# A root on a tmpfs is host memory: the versions that are kept, the slots, the one that is being written and, with
# deltas, the copies that they are applied to. A publisher that looks for changes keeps its weights once more beside
# them. The numbers are the defaults of `refitd serve` and of the publisher.


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


def versions_on_root(transport: WeightTransport) -> int:
    """How many versions lie in host memory where weights take this transport."""
    return _BY_FULL_FILES + (_COPIES_ON_ROOT + _COMPARED_ON_ROOT if transport is WeightTransport.DISK_DELTA else 0)


def on_root(transport: WeightTransport) -> str:
    """The same in words."""
    deltas = f", {_COPIES_ON_ROOT} copies for deltas, {_COMPARED_ON_ROOT} that the publisher compares with"
    more = deltas if transport is WeightTransport.DISK_DELTA else ""
    count = versions_on_root(transport)
    return f"{count} versions ({_KEPT_ON_ROOT} kept, {_SLOTS_ON_ROOT} slots, {_WRITTEN_ON_ROOT} being written{more})"


def host_fault(transport: WeightTransport, version: float, has: float) -> str | None:
    """Why the root does not fit into the host's memory, and what takes less; None where it fits.

    Args:
        transport: how the weights go.
        version: the size of one version, in GiB.
        has: the host's memory, in GiB.
    """
    count, most = versions_on_root(transport), has * (1 - _HEADROOM)
    if count * version <= most:
        return None
    fewer = count - _FEWEST
    remedy = "'refitd serve --keep-last 2 --slots 0' takes" if fewer * version <= most else "and at least"
    return (
        f"a root on a tmpfs would hold {on_root(transport)} of {version:.1f} GiB, {count * version:.1f} GiB in all, "
        f"and the host has {has:g}, of which {_HEADROOM:.0%} is to stay free: {remedy} {fewer * version:.1f} GiB"
    )
