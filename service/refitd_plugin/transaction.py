"""What the ranks of an engine decide together, and what came of an update. Pure.

    prepare    each rank: READY or REFUSED             all ready, of one version → commit; otherwise no rank writes
    commit     each rank: WRITTEN, UNTOUCHED, FAILED   all written, and right together → keep; all untouched → refuse;
                                                       otherwise → restore
    restore    each rank: UNTOUCHED, RESTORED, LOST    what the engine serves is as well known as its worst rank

Every rank computes the same from the same reports. A report that does not come stands for a rank in an unknown
state: it may be a stock server that loads by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from refitd_client.contract.plugin import UpdateOutcome


class RankState(StrEnum):
    """Where one rank stands after its part of a phase."""

    READY = "ready"  # everything was checked, nothing is written
    REFUSED = "refused"  # something is wrong with the version, nothing is written
    WRITTEN = "written"  # all of the new version, none of the old
    UNTOUCHED = "untouched"  # it came to nothing before the first write
    FAILED = "failed"  # it came to nothing after the first write
    RESTORED = "restored"  # the fingerprints are those of before
    LOST = "lost"  # its contents are not known


class NextStep(StrEnum):
    """What every rank does next."""

    COMMIT = "commit"
    KEEP = "keep"
    REFUSE = "refuse"
    RESTORE = "restore"
    ABANDON = "abandon"  # stop, and tell that the contents are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank reports to the others. `version` is the digest of what it will load; `needs` as in an answer.

    Of a rank that has written: `slices` is the digest of the slices that its model has of tensors, and `sums` what is
    in them (`slices.py`); "" where it does not know.
    """

    rank: int
    state: RankState
    reason: str = ""
    version: str = ""
    needs: str = ""
    slices: str = ""
    sums: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done next, and where it is not COMMIT or KEEP a sentence that says why."""

    step: NextStep
    reason: str = ""


Reports = Sequence[RankReport | None]


def after_prepare(reports: Reports) -> Decision:
    """Commit only if every rank is ready for the same version."""
    if (absent := _absent(reports)) is not None:
        return Decision(NextStep.ABANDON, absent)
    if refused := [each for each in _present(reports) if each.state is not RankState.READY]:
        return Decision(NextStep.REFUSE, _said(refused, reports))
    if len({each.version for each in _present(reports)}) > 1:
        return Decision(NextStep.REFUSE, "the ranks do not see the same version: is every rank's root the same folder?")
    return Decision(NextStep.COMMIT)


def after_commit(reports: Reports, fault: str = "") -> Decision:
    """Keep only what is whole on every rank. `fault` says what is wrong with what all have written, if anything is."""
    if (absent := _absent(reports)) is not None:
        return Decision(NextStep.RESTORE, absent)
    present = _present(reports)
    if all(each.state is RankState.WRITTEN for each in present):
        return Decision(NextStep.RESTORE, fault) if fault else Decision(NextStep.KEEP)
    wrong = [each for each in present if each.state is not RankState.WRITTEN]
    touched = any(each.state is not RankState.UNTOUCHED for each in present)
    return Decision(NextStep.RESTORE if touched else NextStep.REFUSE, _said(wrong, reports))


def after_restore(reports: Reports) -> UpdateOutcome:
    """What the engine serves is as well known as what its worst rank serves."""
    states = {None if each is None else each.state for each in reports}
    if not states <= {RankState.UNTOUCHED, RankState.RESTORED}:
        return UpdateOutcome.UNKNOWN
    return UpdateOutcome.RESTORED if RankState.RESTORED in states else UpdateOutcome.REFUSED


def _absent(reports: Reports) -> str | None:
    silent = [str(rank) for rank, each in enumerate(reports) if each is None]
    if not silent:
        return None
    return f"nothing was heard from rank {', '.join(silent)}: is the plugin installed and on for every rank?"


def _present(reports: Reports) -> list[RankReport]:
    return [each for each in reports if each is not None]


def _said(some: Sequence[RankReport], reports: Reports) -> str:
    """The reason where all give the same; otherwise the first reason, with its rank."""
    first = some[0]
    if len(reports) == 1 or (len(some) == len(reports) and len({each.reason for each in some}) == 1):
        return first.reason
    return f"rank {first.rank}: {first.reason}"
