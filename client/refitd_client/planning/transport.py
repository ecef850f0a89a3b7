"""The ways for weights to get from trainer to engines, and what stands against each. Pure; `rules.py` chooses.

disk         files on a root that both see; refitd's own way, and the one that needs nothing else
disk+delta   the same, and only what changed where little did
handover     trainer and engine share a GPU: the engine opens the trainer's tensors by CUDA IPC
nccl         a broadcast over a process group of trainer rank 0 and all engine ranks; by the trainer, not by refitd
gloo         the same through host memory, where neither files nor NCCL can be had
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class Transport(StrEnum):
    """The ways."""

    DISK = "disk"
    DISK_DELTA = "disk+delta"
    HANDOVER = "handover"
    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What can be carried out. `plugin`: refitd is installed in SGLang's environment. `deltas`: the service does."""

    plugin: bool = False
    deltas: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the rules look at.

    `group` is the size of the update group; `doubled` the device that two of its ranks are on, None where none is;
    `devices` the number of devices in the job; `nodes` those that hold any of it; `whole`: the trainer has one rank,
    which holds every tensor whole.
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
    installation: Installation

    @property
    def shares(self) -> bool:
        """Whether trainer and engines meet on a GPU."""
        return self.colocated or self.doubled is not None


def no_broadcast(now: Situation) -> str:
    """Why NCCL cannot broadcast where trainer and engines share a GPU."""
    if now.doubled is None:
        return "trainer and engines are colocated"
    return (
        f"the update group would have {now.group} ranks, and two of them are on {now.doubled}: "
        "NCCL refuses that (Duplicate GPU detected)"
    )


def hinders_handover(now: Situation) -> str | None:
    """Why the trainer's tensors cannot be handed over; None where they can."""
    if not now.shares:
        return "trainer and engines have GPUs of their own"
    if now.nodes > 1:
        return "it needs one host, and the job lies on several"
    if not now.whole:
        return "it needs a trainer of one rank, which holds every tensor whole"
    if now.lora:
        return "adapters go by disk"
    if now.expandable_segments:
        return "memory of expandable segments cannot be opened by CUDA IPC: leave expandable_segments out"
    return None if now.installation.plugin else "it needs refitd's plugin inside SGLang (say --plugin where it is)"


def hinders(transport: Transport, now: Situation) -> str | None:
    """Why a way cannot be gone in this situation; None where it can."""
    match transport:
        case Transport.DISK:
            return None if now.shared_files else "the engines do not see the trainer's files"
        case Transport.DISK_DELTA:
            if now.lora:
                return "adapters are small: they go whole"
            if not now.installation.deltas:
                return "the service of this release does not carry deltas out"
            return None if now.shared_files else "the engines do not see the trainer's files"
        case Transport.HANDOVER:
            return hinders_handover(now)
        case Transport.NCCL:
            return no_broadcast(now) if now.shares else None
        case Transport.GLOO:
            return None
        case _:
            assert_never(transport)


def carried_out(transport: Transport, now: Situation) -> bool:
    """Whether this installation does it itself, today. Broadcasts are the trainer's own: refitd only advises."""
    return transport not in {Transport.NCCL, Transport.GLOO} and hinders(transport, now) is None


UNMEASURED = "not measured yet"
COSTS: Mapping[Transport, str] = {
    Transport.DISK: "31.3 ms from publish until served for a tiny model on a CPU, of which refitd adds 23.6 ms",
    Transport.DISK_DELTA: UNMEASURED,
    Transport.HANDOVER: UNMEASURED,
    Transport.NCCL: UNMEASURED,
    Transport.GLOO: UNMEASURED,
}
"""What each costs, in figures of docs/benchmarks.md: a test holds every number here against that page."""

ENVIRONMENT: Mapping[Transport, Mapping[str, Mapping[str, str]]] = {
    Transport.NCCL: {
        # SGLang sets it for its own processes; a trainer without it joins the group, and its first broadcast fails.
        "trainer": {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"},
        "engine": {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"},
    },
}
_HUB = {"HF_HUB_OFFLINE": "1"}  # a path that is gone must fail, and never be looked for on the hub


def environment(transport: Transport, *, expandable_segments: bool) -> dict[str, dict[str, str]]:
    """The variables that trainer and engine need, by who needs them."""
    of = ENVIRONMENT.get(transport, {})
    trainer = dict(of.get("trainer", {}))
    if expandable_segments:
        trainer["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {"trainer": trainer, "engine": {**_HUB, **of.get("engine", {})}}
