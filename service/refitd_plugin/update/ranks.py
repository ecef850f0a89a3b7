"""What the ranks of an engine decide together, what came of an update, and how they report to each other.

    prepare    each rank: READY or REFUSED             all ready, of one version → commit; otherwise no rank writes
    commit     each rank: WRITTEN, UNTOUCHED, FAILED   all written, and right together → keep; all untouched → refuse;
                                                       otherwise → restore
    restore    each rank: UNTOUCHED, RESTORED, LOST    what the engine serves is as well known as its worst rank

Every rank computes the same from the same reports. A report that does not come stands for a rank in an unknown
state: it may be a stock server that loads by itself.

They report through the key-value store that torch.distributed began with. A rank writes its report and reads those of
all others. The first rank that knows what follows writes the decision, and every rank does what was written first, also
one that waited too long and gave up: so no two ranks ever do different things. Nothing is unpickled, no collective is
begun that a missing rank could hang, and SGLang's own groups are left alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec

from refitd_client.contract.decoding import from_json
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
    COMMIT = "commit"
    KEEP = "keep"
    REFUSE = "refuse"
    RESTORE = "restore"
    ABANDON = "abandon"  # stop, and tell that the contents are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank reports to the others. `version` is the digest of what it will load; `needs` as in an answer.

    Of a rank that has written: `slices` is the table of the slices that its model has of tensors, and `sums` what is in
    them (`proof/slices.py` encodes both); "" where it does not know.
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


_KEPT_ROUNDS = 3  # rounds whose keys stay


class Ranks:
    """The ranks of one engine, as seen by one of them. Each calls the same methods in the same order.

    `store` is a `torch.distributed.Store`, None for a rank alone.
    """

    def __init__(self, store: Any, rank: int, size: int, wait: float, prefix: str = "refitd") -> None:
        if store is None and size > 1:
            raise ValueError("several ranks need a store to speak through")
        self._store: Any = store
        self._wait, self._prefix = wait, prefix
        self.rank, self.size = rank, size
        self._round = 0

    def begin(self) -> None:
        """A new update. All ranks count alike, since SGLang gives each request to each of them."""
        self._round += 1
        if self._store is not None and self._round > _KEPT_ROUNDS:
            old = f"{self._prefix}/{self._round - _KEPT_ROUNDS}"
            keys = [f"{old}/{phase}/{self.rank}" for phase in ("prepare", "commit", "restore")]
            if self.rank == 0:
                keys += [f"{old}/{phase}/next" for phase in ("prepare", "commit")]
            for key in keys:
                self._store.delete_key(key)

    def decide(self, phase: str, mine: RankReport, decide: Callable[[Reports], Decision]) -> tuple[Decision, Reports]:
        """Report to the other ranks and read their reports. Returns what all ranks do next, which `decide` computes,
        and the reports. Raises Exception: the store is gone (torch raises several kinds).
        """
        reports = self.exchange(phase, mine)
        decision = decide(reports)
        if self._store is not None and self.size > 1:
            text = msgspec.json.encode(decision).decode()
            decision = from_json(self._store.compare_set(self._key(phase, "next"), "", text), Decision)
        return decision, reports

    def exchange(self, phase: str, mine: RankReport) -> Reports:
        """Report to the other ranks and read their reports. Raises as `decide`."""
        if self._store is None or self.size == 1:
            return [mine]
        self._store.set(self._key(phase, self.rank), msgspec.json.encode(mine).decode())
        deadline = time.monotonic() + self._wait
        return [mine if rank == self.rank else self._hear(phase, rank, deadline) for rank in range(self.size)]

    def _hear(self, phase: str, rank: int, deadline: float) -> RankReport | None:
        key = self._key(phase, rank)
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            return from_json(self._store.get(key), RankReport)
        except (RuntimeError, msgspec.MsgspecError):  # torch's DistStoreError is one
            return None

    def _key(self, phase: str, who: int | str) -> str:
        return f"{self._prefix}/{self._round}/{phase}/{who}"


def default_store() -> Any:
    """The store of this process's default group; None where there is none."""
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_initialized():
        return None
    return distributed_c10d._get_default_store()  # noqa: SLF001 - torch offers no other way to the store of a group
