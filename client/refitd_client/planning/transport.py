"""How weights get from trainer to engines: a table of named rules, the first that applies decides. Pure.

disk         files on a root that both see; refitd's own way, and the one that needs nothing else
disk+delta   the same, and only what changed where little did
handover     trainer and engine share a GPU: the engine opens the trainer's tensors by CUDA IPC
nccl         a broadcast over a process group of trainer rank 0 and all engine ranks; by the trainer, not by refitd
gloo         the same through host memory, where neither files nor NCCL can be had
"""

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, by which rule, and why."""

    transport: Transport
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: it chooses `transport` where `applies`."""

    name: str
    transport: Transport
    applies: Callable[[Situation], bool]
    reason: Callable[[Situation], str]


def _no_nccl(now: Situation) -> str:
    if now.doubled is None:
        return "trainer and engines are colocated"
    return (
        f"the update group would have {now.group} ranks, and two of them are on {now.doubled}: "
        "NCCL refuses that (Duplicate GPU detected)"
    )


def _separate(now: Situation) -> str:
    return f"each of the {now.group} ranks of the update group has a GPU of its own"


RULES: tuple[Rule, ...] = (
    Rule(
        name="no-shared-files-one-device",
        transport=Transport.GLOO,
        applies=lambda now: not now.shared_files and now.shares,
        reason=lambda now: f"the engines do not see the trainer's files, and {_no_nccl(now)}",
    ),
    Rule(
        name="no-shared-files",
        transport=Transport.NCCL,
        applies=lambda now: not now.shared_files,
        reason=lambda _: (
            "the engines do not see the trainer's files, and each rank of the update group has a GPU of its own"
        ),
    ),
    Rule(
        name="lora",
        transport=Transport.DISK,
        applies=lambda now: now.lora,
        reason=lambda _: "an adapter is small: its files cost less than any process group",
    ),
    Rule(
        name="hand-over",
        transport=Transport.HANDOVER,
        applies=lambda now: hinders_handover(now) is None,
        reason=lambda now: f"{_no_nccl(now)}; the engine can open the trainer's tensors where they are",
    ),
    Rule(
        name="colocated",
        transport=Transport.DISK_DELTA,
        applies=lambda now: now.colocated,
        reason=lambda now: f"{_no_nccl(now)}, which rules a process group out; files on a shared root go everywhere",
    ),
    Rule(
        name="duplicate-device",
        transport=Transport.DISK_DELTA,
        applies=lambda now: now.doubled is not None,
        reason=lambda now: f"{_no_nccl(now)}; files on a shared root go everywhere",
    ),
    Rule(
        name="separate-devices",
        transport=Transport.NCCL,
        applies=lambda now: now.devices > 1,
        reason=_separate,
    ),
)


def choose(now: Situation) -> Choice:
    """The first rule that applies. One always does: a device that is alone is doubled."""
    rule = next(rule for rule in RULES if rule.applies(now))
    if rule.transport is Transport.DISK_DELTA and not now.installation.deltas:
        return Choice(transport=Transport.DISK, rule=rule.name, reason=rule.reason(now))
    return Choice(transport=rule.transport, rule=rule.name, reason=rule.reason(now))


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
            return _no_nccl(now) if now.shares else None
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
