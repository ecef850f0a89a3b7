"""The lines of a reclaim plan, from verdicts and outcomes to what the API says. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from refitd.policy.holdings import Holdings, Weight
from refitd.policy.keep import KeepVerdict
from refitd.root.scan import Incoming
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, SLOTS, TRASH
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

TRASH_PATH = f"{SERVICE_FOLDER}/{TRASH}"
_LEFT = (
    "its version was deleted: what lies there belonged to no version or was put there afterwards, and refitd may not "
    "delete it; move it out of the root or delete it by hand"
)


def version_line(verdict: KeepVerdict, weight: Weight) -> Reclaimable:
    return Reclaimable(
        path=verdict.record.path,
        keep=verdict.keep,
        reasons=list(verdict.reasons),
        version=verdict.record.id,
        bytes=weight.bytes,
        foreign_bytes=weight.foreign,
    )


def with_reasons(verdict: KeepVerdict, *more: str | None) -> KeepVerdict:
    return replace(verdict, reasons=(*verdict.reasons, *filter(None, more)))


def left_line(path: str, found: Holdings) -> Reclaimable:
    total = found.bytes + found.foreign_bytes
    return Reclaimable(path=path, keep=True, reasons=[_LEFT], bytes=total, foreign_bytes=total)


def incoming_line(found: Incoming) -> Reclaimable:
    return Reclaimable(path=found.path, keep=not found.abandoned, reasons=[found.reason], bytes=found.bytes)


def trash_lines(ours: int, foreign: int, left: tuple[str, ...] | None) -> list[Reclaimable]:
    """The lines of the trash, none where it is empty.

    Args:
        ours: bytes that are going to be deleted.
        foreign: bytes that this service did not put there.
        left: why some of it could not be deleted; None where it was not tried.
    """
    if left is None and ours:
        reasons = ("it was deleted before, and the next sweep empties the trash",)
        yielded = [Reclaimable(path=TRASH_PATH, keep=False, reasons=list(reasons), bytes=ours)]
        return yielded + trash_lines(0, foreign, None)
    if not left and not foreign:
        return []
    reasons = left or ("what lies there was not put there by this service: it is not deleted",)
    return [Reclaimable(path=TRASH_PATH, keep=True, reasons=list(reasons), bytes=ours + foreign, foreign_bytes=foreign)]


def over_budget(plan: ReclaimPlan) -> str | None:
    """A sentence that what is kept exceeds the disk budget, with what to do; None where it fits or there is none."""
    if plan.disk_budget is None or plan.kept_bytes <= plan.disk_budget:
        return None
    return (
        f"all that is kept takes {plan.kept_bytes:,} bytes, over the disk budget of {plan.disk_budget:,}: 'refitd "
        "reclaim --dry-run' says what each is kept for; unpin versions, close runs that have ended, or raise "
        "--disk-budget (REFITD_DISK_BUDGET)"
    )


def too_small(plan: ReclaimPlan, largest: int, free: int) -> str | None:
    """A sentence that two versions do not fit, with what to do; None where they do, or no version was good yet.

    Args:
        largest: the bytes of the largest good version.
    """
    room, what = free + plan.kept_bytes + plan.foreign_bytes, "the root has"
    if plan.disk_budget is not None and plan.disk_budget < room:
        room, what = plan.disk_budget, "the disk budget is"
    if 2 * largest <= room:
        return None
    return (
        f"two versions take {2 * largest:,} bytes, and {what} {room:,}: the next one has no room while engines serve "
        "this one. Make room, or raise --disk-budget (REFITD_DISK_BUDGET)"
    )


def plan_of(lines: list[Reclaimable], budget: int | None, *, done: bool) -> ReclaimPlan:
    """The plan with its sums of bytes. `done`: it was carried out."""

    def counted(some: Iterable[Reclaimable]) -> int:
        return sum((line.bytes or 0) - line.foreign_bytes for line in some)

    return ReclaimPlan(
        items=lines,
        freed_bytes=counted(line for line in lines if not line.keep),
        kept_bytes=counted(line for line in lines if line.keep and not line.path.startswith("/")),
        foreign_bytes=sum(line.foreign_bytes for line in lines),
        disk_budget=budget,
        done=done,
    )


class KeptKind(StrEnum):
    """What the bytes in a root are."""

    VERSION = "version"
    INCOMING = "incoming"  # a publisher is writing it, or left it behind
    SLOT = "slot"  # old files that a publisher may write the next version into
    COPY = "copy"  # a model that deltas are applied to
    TRASH = "trash"  # deleted, and not gone from the disk yet
    FOREIGN = "foreign"  # not refitd's to delete; counts in no disk budget


def bytes_by_kind(lines: Iterable[Reclaimable]) -> dict[KeptKind, int]:
    """Add up the lines of a sweep that are kept."""
    found = dict.fromkeys(KeptKind, 0)
    for line in lines:
        found[KeptKind.FOREIGN] += line.foreign_bytes
        if line.keep:
            found[_kind_of(line)] += (line.bytes or 0) - line.foreign_bytes
    return found


def _kind_of(line: Reclaimable) -> KeptKind:
    if line.version is not None:
        return KeptKind.VERSION
    if line.path == TRASH_PATH:
        return KeptKind.TRASH
    if line.path.rpartition("/")[2].startswith(INCOMING_PREFIX):
        return KeptKind.INCOMING
    return KeptKind.SLOT if line.path.startswith(f"{SERVICE_FOLDER}/{SLOTS}/") else KeptKind.COPY
