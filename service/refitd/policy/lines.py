"""The lines of a reclaim plan: from verdicts and outcomes to what the API says. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from refitd.policy.holdings import Holdings
from refitd.policy.keep import Verdict
from refitd.policy.weights import Weight
from refitd.root.leftovers import Incoming
from refitd.root.outcome import Refused
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER, TRASH
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

TRASH_PATH = f"{SERVICE_FOLDER}/{TRASH}"
_LEFT = (
    "its version was deleted: what lies there belonged to no version or was put there afterwards, and refitd may not "
    "delete it; move it out of the root or delete it by hand"
)


def version_line(verdict: Verdict, weight: Weight) -> Reclaimable:
    """What happens to a version."""
    return Reclaimable(
        path=verdict.record.path,
        keep=verdict.keep,
        reasons=list(verdict.reasons),
        version=verdict.record.id,
        bytes=weight.bytes,
        foreign_bytes=weight.foreign,
    )


def recycled_line(verdict: Verdict) -> Reclaimable:
    """A version that is gone and has freed nothing."""
    return version_line(told(verdict, "its files are a free slot now"), Weight())


def told(verdict: Verdict, sentence: str | None) -> Verdict:
    """The verdict with one reason more."""
    return verdict if sentence is None else replace(verdict, reasons=(*verdict.reasons, sentence))


def refused_line(record: VersionRecord, refused: Refused, weight: Weight) -> Reclaimable:
    """A version that stays for now, though nobody needs it."""
    return version_line(Verdict(record, keep=True, reasons=(refused.reason,)), weight)


def left_line(path: str, found: Holdings) -> Reclaimable:
    """A folder whose version was deleted."""
    total = found.bytes + found.foreign_bytes
    return Reclaimable(path=path, keep=True, reasons=[_LEFT], bytes=total, foreign_bytes=total)


def incoming_line(found: Incoming) -> Reclaimable:
    """A folder that is being written, or was."""
    return Reclaimable(path=found.path, keep=not found.abandoned, reasons=[found.reason], bytes=found.bytes)


def trash_lines(ours: int, foreign: int, left: tuple[str, ...] | None) -> list[Reclaimable]:
    """The trash, where anything is in it.

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
    """That what is kept does not fit the disk budget, and what to do; None where it does, or there is none."""
    if plan.disk_budget is None or plan.kept_bytes <= plan.disk_budget:
        return None
    return (
        f"all that is kept takes {plan.kept_bytes:,} bytes, over the disk budget of {plan.disk_budget:,}: 'refitd "
        "reclaim --dry-run' says what each is kept for; unpin versions, close runs that have ended, or raise "
        "--disk-budget (REFITD_DISK_BUDGET)"
    )


def plan_of(lines: list[Reclaimable], budget: int | None, *, done: bool) -> ReclaimPlan:
    """All lines, and what they come to."""
    return ReclaimPlan(
        items=lines,
        freed_bytes=_counted(line for line in lines if not line.keep),
        kept_bytes=_counted(line for line in lines if line.keep and not line.path.startswith("/")),
        foreign_bytes=sum(line.foreign_bytes for line in lines),
        disk_budget=budget,
        done=done,
    )


def _counted(lines: Iterable[Reclaimable]) -> int:
    return sum((line.bytes or 0) - line.foreign_bytes for line in lines)
