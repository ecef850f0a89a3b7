"""Which way the weights go: a table of named rules, the first that applies decides. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from refitd_plan.situation import Situation
from refitd_plan.transport import Transport, hinders_handover, no_broadcast, no_deltas


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


def _where_they_are(now: Situation) -> str:
    return f"{no_broadcast(now)}; the engine can open the trainer's tensors where they are"


def _separate(now: Situation) -> str:
    return f"each of the {now.group} ranks of the update group has a GPU of its own"


RULES: tuple[Rule, ...] = (
    Rule(
        name="no-shared-files-one-device",
        transport=Transport.GLOO,
        applies=lambda now: not now.shared_files and no_broadcast(now) is not None,
        reason=lambda now: f"the engines do not see the trainer's files, and {no_broadcast(now)}",
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
        reason=_where_they_are,
    ),
    Rule(
        name="in-full",
        transport=Transport.DISK,
        applies=lambda now: no_broadcast(now) is not None and no_deltas(now) is not None,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere; {no_deltas(now)}",
    ),
    Rule(
        name="colocated",
        transport=Transport.DISK_DELTA,
        applies=lambda now: now.colocated,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere",
    ),
    Rule(
        name="duplicate-device",
        transport=Transport.DISK_DELTA,
        applies=lambda now: no_broadcast(now) is not None,
        reason=lambda now: f"{no_broadcast(now)}; files on a shared root go everywhere",
    ),
    Rule(
        name="separate-devices",
        transport=Transport.NCCL,
        applies=lambda now: now.devices > 1,
        reason=_separate,
    ),
)


def choose(now: Situation) -> Choice:
    """The first rule that applies. One always does: where there is one device alone, the update group doubles it."""
    rule = next(rule for rule in RULES if rule.applies(now))
    return Choice(transport=rule.transport, rule=rule.name, reason=rule.reason(now))
