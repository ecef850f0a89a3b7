"""Which copies are worth their room. Pure.

1  What this service did not put there is never touched.
2  While somebody may be reading a copy, it stays, by the rules for versions.
3  A run without deltas that could still be carried out needs none: its trainer is gone, or publishes in full. Nor
   does one that is closed, and that no engine follows.
4  Of others that nobody reads, no more than `most` stay; those that are worth nothing go first, then the older ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.copy_readers import Readers
from refitd.state.copy import Copy
from refitd_client.contract.naming import Order


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """What happens to a copy, and why."""

    copy: Copy
    keep: bool
    reason: str


def spare(
    copies: Sequence[Copy],
    readers: Mapping[str, Readers],
    *,
    runs: Collection[str],
    busy: Collection[str],
    most: int,
) -> list[CopyVerdict]:
    """Decide about all copies. `runs` have deltas; of those that are `busy` a copy is being written just now."""
    newest = sorted(copies, key=_worth, reverse=True)
    kept: dict[str, int] = {}
    verdicts: list[CopyVerdict] = []
    for copy in newest:
        verdict = _verdict(copy, readers[copy.name], runs, busy, has_place=kept.get(copy.run, 0) < most)
        kept[copy.run] = kept.get(copy.run, 0) + verdict.keep
        verdicts.append(verdict)
    return verdicts


def _worth(copy: Copy) -> tuple[int, int, str]:
    order = copy.order or Order(0, 0)
    return order.generation, order.step, copy.name


def _verdict(
    copy: Copy, readers: Readers, runs: Collection[str], busy: Collection[str], *, has_place: bool
) -> CopyVerdict:
    if copy.fault is not None:
        return CopyVerdict(copy, keep=True, reason=copy.fault)
    if copy.run in busy:
        return CopyVerdict(copy, keep=True, reason=f"a copy of run {copy.run} is being written")
    if not readers.may_go:
        return CopyVerdict(copy, keep=True, reason=(*readers.reads, "it may still be read")[0])
    if copy.run not in runs:
        return CopyVerdict(copy, keep=False, reason=f"run {copy.run} has no deltas any more, or has ended")
    if not has_place:
        return CopyVerdict(copy, keep=False, reason=f"run {copy.run} has other copies, and nobody reads this one")
    holds = copy.holds or "nothing yet"
    return CopyVerdict(copy, keep=True, reason=f"a copy for engines that know no deltas: it holds {holds}")
