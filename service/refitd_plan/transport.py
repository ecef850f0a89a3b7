"""The ways for weights to get from trainer to engines, and what stands against each. Pure; `rules.py` chooses.

disk         files on a root that both see; refitd's own way, and the one that needs nothing else
disk+delta   the same, and only what changed where little did
handover     on one GPU: the engine opens the trainer's tensors by CUDA IPC, and the files follow
nccl         a broadcast over a process group of trainer rank 0 and all engine ranks; by the trainer, not by refitd
gloo         the same through host memory, where neither files nor NCCL can be had
"""

from enum import StrEnum
from typing import assert_never

from refitd_plan.situation import Situation


class Transport(StrEnum):
    """The ways."""

    DISK = "disk"
    DISK_DELTA = "disk+delta"
    HANDOVER = "handover"
    NCCL = "nccl"
    GLOO = "gloo"


_FOLDERS = "AReaL hands whole folders over, which refitd publishes in full"


def no_broadcast(now: Situation) -> str | None:
    """Why NCCL cannot broadcast; None where it can. Outside the update group ranks may share GPUs."""
    if now.lora:
        return "SGLang takes adapters from files alone"
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
    if not now.whole:
        return "it needs a trainer of one rank, which holds every tensor whole"
    if now.devices > 1:
        found = f"the job lies on {now.devices} GPUs"
        return f"{found}, and from one to another it works where they reach each other, which no plan can see"
    if now.lora:
        return "adapters go by disk"
    if now.expandable_segments:
        return "memory of expandable segments cannot be opened by CUDA IPC: leave expandable_segments out"
    return None if now.plugin else "it needs refitd's plugin inside SGLang (say --plugin where it is)"


def no_deltas(now: Situation) -> str | None:
    """Why what changed cannot be published alone; None where it can."""
    if now.lora:
        return "adapters are small: they go whole"
    if now.areal:
        return _FOLDERS
    if not now.whole:
        return "the trainer's ranks hold parts, and publish them together in full (ShardedPublisher has no deltas)"
    return None


def hinders(transport: Transport, now: Situation) -> str | None:
    """Why a way cannot be gone in this situation; None where it can."""
    match transport:
        case Transport.DISK:
            return None if now.shared_files else "the engines do not see the trainer's files"
        case Transport.DISK_DELTA:
            return no_deltas(now) if now.shared_files else "the engines do not see the trainer's files"
        case Transport.HANDOVER:
            return hinders_handover(now)
        case Transport.NCCL:
            return no_broadcast(now)
        case Transport.GLOO:
            return "SGLang takes adapters from files alone" if now.lora else None
        case _:
            assert_never(transport)


def carried_out(transport: Transport, now: Situation) -> bool:
    """Whether refitd does it itself in this situation. Broadcasts are the trainer's own: refitd only advises."""
    return transport not in {Transport.NCCL, Transport.GLOO} and hinders(transport, now) is None
