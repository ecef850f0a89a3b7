"""Which slots are worth their disk space. Pure: slots and the newest versions in, one verdict for each slot out.

1  What this service did not put there is never touched; what is half made or damaged goes.
2  Where slots are off, the run is closed, or its newest version has another layout, they go: no publisher will take
   them.
3  A slot that no publisher has taken for `ttl` seconds goes: its trainer is gone.
4  A run has at most `count`. The one that waits the longest goes first.
5  Slots are the first thing that a disk budget gives up.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.keep import KeepRules
from refitd.policy.leases import Views, leases
from refitd.root.scan import Slot
from refitd.state.version import VersionRecord
from refitd.text import spoken
from refitd_client.contract.states import Kind, VersionState


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRules:
    """How many slots a run may have, for how many seconds, within how many bytes of disk. `off`: why there are none."""

    count: int = 2
    ttl: float = 3600.0
    disk_budget: int | None = None
    off: str | None = None


@dataclass(frozen=True, slots=True)
class SlotVerdict:
    slot: Slot
    keep: bool
    reason: str


def spare(
    slots: Sequence[Slot],
    newest: Mapping[str, str | None],
    rules: SlotRules,
    *,
    used: int,
    ages: Mapping[str, float],
    closed: Collection[str] = (),
) -> list[SlotVerdict]:
    """Decide about all slots of a root at once.

    Args:
        newest: the layout of each run's newest version.
        used: the bytes of the disk budget that all else takes.
        ages: the seconds for which a slot, by its path, is known to wait.
    """
    waiting = sorted(slots, key=lambda slot: ages.get(slot.path, 0.0))
    verdicts: list[SlotVerdict] = []
    kept: dict[str, int] = {}
    for slot in waiting:
        reason = f"run {slot.run} is closed" if slot.run in closed and slot.fault is None else None
        reason = reason or _useless(slot, newest, rules, ages.get(slot.path, 0.0))
        if reason is None and kept.get(slot.run, 0) >= rules.count:
            reason = f"run {slot.run} has {rules.count} other slots"
        if reason is None and rules.disk_budget is not None and used + slot.bytes > rules.disk_budget:
            reason = f"given up for the disk budget of {rules.disk_budget:,} bytes"
        if reason is None:
            kept[slot.run] = kept.get(slot.run, 0) + 1
            used += slot.bytes
        verdicts.append(SlotVerdict(slot, not slot.ours or reason is None, reason or _free(slot)))
    return verdicts


def why_not(record: VersionRecord, views: Views) -> str | None:
    """Why a version's files must not be written again, though the version may be deleted. None if they may.

    A reader that has a deleted file open reads on undisturbed; one that has a recycled file open reads another version.
    So an
    engine that cannot be reached never counts as dead here.
    """
    if not record.files.owned or record.kind is not Kind.FULL:
        return "its files were not written by refitd as a full version"
    if record.files.weights is None or not record.state.may_have_good_files:
        return "it was never found good"
    held = leases(views, dead_after=float("inf")).get(record.id)
    return str(held[0]) if held else None


def newest_full(versions: Sequence[VersionRecord]) -> Iterator[VersionRecord]:
    """The newest good full version of each run that refitd's publisher wrote."""
    found: dict[str, VersionRecord] = {}
    for version in versions:
        if version.files.owned and version.kind is Kind.FULL and version.state is VersionState.SEALED:
            best = found.get(version.run)
            if best is None or version.order > best.order:
                found[version.run] = version
    yield from found.values()


def _useless(slot: Slot, newest: Mapping[str, str | None], rules: SlotRules, age: float) -> str | None:
    if slot.fault is not None:
        return slot.fault
    if rules.off is not None:
        return rules.off
    if newest.get(slot.run) != slot.layout:
        return f"the newest version of run {slot.run} has other tensors, or is none of refitd's"
    if age >= rules.ttl:
        return f"no publisher has taken it for {spoken(age)}"
    return None


def _free(slot: Slot) -> str:
    return f"a free slot: the next version of run {slot.run} may be written into its files"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRules:
    """What is kept, what of the rest becomes a slot, and the seconds between two sweeps when nothing changes."""

    interval: float
    keep: KeepRules
    slots: SlotRules
