"""What to keep, what to delete, and why. Pure: versions, leases and rules in, one verdict for each version out.

The rules, the strongest first. A version that no rule keeps is dropped.

    1  A listing that failed or is empty keeps everything: a vanished mount must not look like a reason to delete. An
       empty one does not where all that is known is RETIRED: it is what a kill leaves right before the end. A journal
       that is being rebuilt keeps everything: what the lost one knew of readers is not known.
    2  Versions without a verdict yet (ANNOUNCED, SETTLING, VALIDATING, UNKNOWN) stay, those whose files are read again,
       and those not under the root.
       A trainer's own folder (`refitd_client/validation/foreign.py`) stays as long as its trainer leaves it there.
       Of a closed run an UNKNOWN one goes, unless it is newer than all that are good or UNKNOWN: it may be all that is
       left of a training that no engine followed.
    3  A lease or a pin keeps. The last good version of a run has a lease. The newest SEALED of a run keeps itself. Of a
       closed run that no engine follows it has no lease, and the budget may take it.
    4  The newest `last` SEALED of a run, and those whose step divides by `every`, stay, unless the run was restarted
       at or before their step: the newer generation replaces them. What was rolled back from does not count among the
       newest. What a rollback would go to stays as well, however many unserved versions came after it; not with
       `last` 1. Of a closed run neither stays: it ends with its newest good version.
    5  REJECTED and LOST are evidence: they stay for `rejected_for` seconds. A folder that nothing proves to be a
       version's stays for good (`policy/holdings.py`).
    6  What a kept version needs stays with it: the base of a delta, and whatever has its folder in, around or on it.
    7  Over the disk budget, what only 4 and 5 keep goes, until the rest fits: first evidence, then every Nth, then the
       last ones, each oldest first, then the newest of closed runs that no engine follows, then what a rollback would
       go to, of runs that no engine follows before the others.
       The newest piece of evidence of each run is the last evidence to go. What a rollback would go to stays while a
       version of its run is ANNOUNCED, SETTLING or VALIDATING: that one may turn out bad, and goes itself then. Of a
       run that engines follow it never goes for the bytes of versions without a verdict, of whatever run: they may be
       bad, or wait for engines for ever. If the rest still does not fit, the verdicts say so. Every byte that refitd
       may delete counts. Copies for deltas, what publishers are writing and the trash are not given up for the budget;
       slots are, before any version (`policy/spare_slots.py`)."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import groupby
from typing import assert_never

from refitd.policy.goals import last_good, last_good_before
from refitd.policy.holdings import Weight, Weights, weigh
from refitd.policy.leases import Lease, reasons_of
from refitd.policy.readiness import Withheld
from refitd.root.handle import parts_below
from refitd.root.scan import Listing, ListingFailed
from refitd.state.version import VersionRecord
from refitd.text import spoken
from refitd_client.contract.naming import version_folder
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import is_foreign


@dataclass(frozen=True, slots=True)
class Need:
    """The id of a version that must stay, and the reason as a sentence about it."""

    version: str
    reason: str


def needs_of(versions: Sequence[VersionRecord]) -> dict[str, list[Need]]:
    """Map the ids of versions to what they need: the base of a delta, and versions whose folders overlap with theirs.

    A base is named by its id, or by its folder in the same run. A delta that is rejected or lost needs nothing. A
    RETIRED
    delta does: what still keeps it is an engine that reads it.
    """
    by_name = {(v.run, name): v.id for v in versions for name in (v.id, version_folder(v.order))}
    needs: dict[str, list[Need]] = {}
    for version in versions:
        base = by_name.get((version.run, version.base)) if version.base is not None else None
        if base is not None and not (version.state.is_bad or version.state is VersionState.DELETED):
            needs.setdefault(version.id, []).append(Need(base, f"base of {version.id}, which is kept"))
    for one, other in _overlaps(versions):
        needs.setdefault(one.id, []).append(_overlapping(other, one))
        needs.setdefault(other.id, []).append(_overlapping(one, other))
    return needs


def before_their_bases(versions: Sequence[VersionRecord]) -> list[str]:
    """The order in which versions go, by their ids: as given, but what stands on a version goes right before it."""
    place = {version.id: number for number, version in enumerate(versions)}
    turn: dict[str, int] = {}
    oldest_first = sorted(versions, key=lambda version: version.order)
    for version in oldest_first:  # a base is older than what stands on it
        turn[version.id] = min(place[version.id], turn.get(version.base or "", len(versions)))
    newest_first = oldest_first[::-1]
    return [version.id for version in sorted(newest_first, key=lambda version: turn[version.id])]


def standing_on(base: VersionRecord, versions: Iterable[VersionRecord]) -> list[VersionRecord]:
    """The deltas on a version that engines may still be brought to."""
    return [each for each in versions if each.base == base.id and each.state is VersionState.SEALED]


def _overlapping(needed: VersionRecord, by: VersionRecord) -> Need:
    return Need(needed.id, f"its folder overlaps with that of {by.id}, which is kept")


def _overlaps(versions: Sequence[VersionRecord]) -> Iterator[tuple[VersionRecord, VersionRecord]]:
    """Pairs of which one lies on or in the other: a rewritten checkpoint has the path of the one before it."""
    at: dict[tuple[str, ...], list[VersionRecord]] = {}
    for version in versions:
        at.setdefault(tuple(version.path.split("/")), []).append(version)
    for parts, here in at.items():
        for depth in range(1, len(parts) + 1):
            for outer in at.get(parts[:depth], ()):
                yield from ((outer, inner) for inner in here if inner is not outer)


KEEP_LAST = (  # the help of the setting, beside the rule
    "Good versions of each run to keep, newest first, besides what a rollback goes to (1: nothing to go back to)"
)
SPARED = "its folder is its trainer's own: refitd deletes it only with --reclaim-foreign (REFITD_RECLAIM_FOREIGN)"
_NO_MORE = "and nothing else may go"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """What stays besides what has a lease or a pin. `last` is at least 1, `every` 0 means none. `disk_budget` is in
    bytes, `rejected_for` in seconds. `foreign`: trainers' own folders are deleted like the rest.
    """

    last: int = 3
    every: int = 0
    disk_budget: int | None = None
    rejected_for: float = 86400.0
    foreign: bool = False

    def spares(self, version: VersionRecord) -> bool:
        """Whether a version's folder is its trainer's to delete."""
        return not self.foreign and is_foreign(version.path)


@dataclass(frozen=True, slots=True)
class KeepVerdict:
    """What happens to a version, with at least one reason; the most important comes first."""

    record: VersionRecord
    keep: bool
    reasons: tuple[str, ...]


class _Rank(IntEnum):
    """In the order in which the disk budget gives wishes up."""

    OLD_EVIDENCE = auto()
    NEWEST_EVIDENCE = auto()
    EVERY = auto()
    LAST = auto()
    CLOSED = auto()
    UNFOLLOWED_ROLLBACK = auto()
    ROLLBACK = auto()


@dataclass(frozen=True, slots=True)
class _Wish:
    """A version that only a rule keeps."""

    rank: _Rank
    record: VersionRecord
    reason: str


@dataclass(frozen=True, slots=True)
class _Budget:
    """What versions may take: `limit` bytes less those that other things take `beside` them, by kind."""

    limit: int | None
    beside: Mapping[str, int]

    def excess(self, used: int) -> tuple[str, ...]:
        """A sentence where the kept versions take more than that, else nothing."""
        total = used + sum(self.beside.values())
        if self.limit is None or total <= self.limit:
            return ()
        shares = "".join(f", {what} {size:,} of them" for what, size in self.beside.items() if size)
        return (f"all that is kept takes {total:,} bytes{shares}, over the disk budget of {self.limit:,}, {_NO_MORE}",)


Reasons = dict[str, list[str]]
_NOTHING = Weight(bytes=0)


def keep(
    versions: Sequence[VersionRecord],
    leases: Mapping[str, Sequence[Lease]],
    rules: KeepRules,
    *,
    listing: Listing | ListingFailed | Withheld,
    ages: Mapping[str, float],
    weights: Weights | None = None,
    beside: Mapping[str, int] | None = None,
    closed: Collection[str] = (),
    followed: Collection[str] = (),
) -> list[KeepVerdict]:
    """Decide about all versions of a root at once, in the order given.

    Args:
        leases: who needs them, by their ids.
        ages: for how many seconds (of the monotonic clock) versions are known to be REJECTED or LOST.
        weights: what versions take on disk, by their ids; None: what their records say.
        beside: the bytes that other things in the root take of the disk budget, by what they are.
    """
    if (doubt := _doubt(listing, versions)) is not None:
        return [KeepVerdict(version, keep=True, reasons=(doubt,)) for version in versions]
    weights = weigh(versions, {}, rules.spares) if weights is None else weights
    there = {found.path for found in listing.found} if isinstance(listing, Listing) else set[str]()
    ended = _ended(versions, closed, there)
    unproven = _unproven(versions, weights, ended)
    proven = [version for version in versions if version.id not in unproven]
    left = set(closed) - set(followed)
    firm = _firm(versions, leases, unproven, closed, ended)
    for newest, reason in _newest(versions):
        if newest.run not in left:
            firm.setdefault(newest.id, []).append(reason)
    for version in versions:
        if version.path in there and rules.spares(version):
            firm.setdefault(version.id, []).append(SPARED)
    wishes = sorted(
        [*_evidence(proven, rules, ages), *_wishes(proven, rules, closed, followed, left)],
        key=lambda wish: (wish.rank, wish.record.order, wish.record.run),
    )
    awaited = {version.run for version in versions if version.state.awaits_verdict}
    for wish in wishes:
        if wish.rank >= _Rank.UNFOLLOWED_ROLLBACK and wish.record.run in awaited:
            firm.setdefault(wish.record.id, []).append(wish.reason)
    budget = _Budget(rules.disk_budget, beside or {})
    undecided = _used((v.id for v in versions if v.state.is_open and v.id in firm), weights)
    kept, given_up = _fit(needs_of(versions), firm, wishes, budget, weights, undecided)
    excess = budget.excess(_used(kept, weights))
    superseded = _superseded(versions)
    verdicts: list[KeepVerdict] = []
    for version in versions:
        if version.id in kept:
            verdicts.append(KeepVerdict(version, keep=True, reasons=(*kept[version.id], *excess)))
        else:
            why = given_up.get(version.id) or [_why_dropped(version, rules, superseded, closed)]
            verdicts.append(KeepVerdict(version, keep=False, reasons=tuple(why)))
    return verdicts


def _doubt(listing: Listing | ListingFailed | Withheld, versions: Sequence[VersionRecord]) -> str | None:
    match listing:
        case Withheld(reason):
            return f"{reason}: nothing is deleted"
        case ListingFailed(reason):
            return f"the root could not be listed ({reason}): nothing is deleted"
        case Listing() if not listing.found and any(v.state is not VersionState.RETIRED for v in versions):
            return "the listing of the root is empty: it may be unmounted, so nothing is deleted"
        case Listing():
            return None
        case _:
            assert_never(listing)


def _firm(
    versions: Sequence[VersionRecord],
    leases: Mapping[str, Sequence[Lease]],
    unproven: Mapping[str, str],
    closed: Collection[str],
    ended: Collection[str],
) -> Reasons:
    """Rules 2 and 3, and what nothing proves to be a version: what no budget can drop."""
    firm: Reasons = {}
    for version in versions:
        reasons = reasons_of(leases.get(version.id, ()))
        if version.id in unproven:
            reasons.append(unproven[version.id])
        if version.pinned:
            reasons.append("pinned")
        if version.id not in ended and (unready := _unready(version, closed)) is not None:
            reasons.append(unready)
        if parts_below(version.path) is None:
            reasons.append(f"its path {version.path!r} is not under the root: only what lies there is ever deleted")
        if reasons:
            firm[version.id] = reasons
    return firm


def _newest(versions: Sequence[VersionRecord]) -> Iterator[tuple[VersionRecord, str]]:
    for _, group in _by_run(version for version in versions if version.state is VersionState.SEALED):
        newest = group[0]
        reason = f"newest good version of run {newest.run}"
        if newest.barred:
            reason = f"newest version on disk of run {newest.run}, though {newest.why_barred}"
        yield newest, reason


def _ended(versions: Sequence[VersionRecord], closed: Collection[str], there: Collection[str]) -> set[str]:
    """The UNKNOWN versions of closed runs that go by rule 2. One whose folder is gone is no newer version."""
    good = [v for v in versions if v.state is VersionState.SEALED]
    unknown = [v for v in versions if v.state is VersionState.UNKNOWN]
    newest = {group[0].id for _, group in _by_run([*good, *(v for v in unknown if v.path in there)])}
    return {version.id for version in unknown if version.run in closed} - newest


def _unproven(versions: Sequence[VersionRecord], weights: Weights, ended: Collection[str]) -> dict[str, str]:
    """Why folders of versions that would be deleted may not be refitd's. Of a RETIRED one only a part may be left."""
    refusals = {
        version.id: weights.get(version.id, _NOTHING).refusal
        for version in versions
        if version.state.is_bad or version.id in ended
    }
    return {version: refusal for version, refusal in refusals.items() if refusal is not None}


def _unready(version: VersionRecord, closed: Collection[str]) -> str | None:
    """Rule 2, by state: why nothing can be said about the version yet."""
    match version.state:
        case VersionState.ANNOUNCED | VersionState.SETTLING | VersionState.VALIDATING:
            return f"{version.state}: it has no verdict yet"
        case VersionState.UNKNOWN:
            stays = "none of its run is newer" if version.run in closed else "is tried again"
            return f"UNKNOWN: it has no verdict yet, and {stays}"
        case VersionState.DELETED:
            return "DELETED: nothing is left of it"
        case VersionState.SEALED | VersionState.LOST if version.verdict.in_doubt:
            return f"{version.state}, and its files are read again"
        case VersionState.SEALED | VersionState.RETIRED | VersionState.REJECTED | VersionState.LOST:
            return None
        case _:
            assert_never(version.state)


def _evidence(versions: Sequence[VersionRecord], rules: KeepRules, ages: Mapping[str, float]) -> Iterator[_Wish]:
    left = {v.id: rules.rejected_for - ages.get(v.id, 0.0) for v in versions if v.state.is_bad}
    unless = "" if rules.disk_budget is None else " unless the disk budget wants it"
    for _, group in _by_run(version for version in versions if left.get(version.id, 0.0) > 0):
        for version in group:
            rank = _Rank.NEWEST_EVIDENCE if version is group[0] else _Rank.OLD_EVIDENCE
            stays = f"stays for another {spoken(left[version.id])}{unless}"
            yield _Wish(rank, version, f"it is evidence of why it was {version.state}, and {stays}")


def _wishes(
    versions: Sequence[VersionRecord],
    rules: KeepRules,
    closed: Collection[str],
    followed: Collection[str],
    left: Collection[str],
) -> Iterator[_Wish]:
    """Rule 4, and the newest of the runs that are `left`: closed, and followed by no engine."""
    for newest, reason in _newest(versions):
        if newest.run in left:
            yield _Wish(_Rank.CLOSED, newest, f"{reason}, which is closed")
    superseded = _superseded(versions)
    sealed = [v for v in versions if v.state is VersionState.SEALED and v.id not in superseded]
    for version in sealed:
        if rules.every and version.order.step % rules.every == 0:
            yield _Wish(_Rank.EVERY, version, f"its step divides by {rules.every}")
    for run, group in _by_run(v for v in sealed if not v.barred and v.run not in closed):
        for version in group[: rules.last]:
            yield _Wish(_Rank.LAST, version, f"one of the newest {rules.last} good versions of run {run}")
    if rules.last > 1:
        for run, group in _by_run(version for version in versions if version.run not in closed):
            current = last_good(group)  # what engines serve now has a lease
            back = None if current is None else last_good_before(group, current)
            if back is not None:
                reason = f"engines of run {run} served it before the current one: a rollback goes to it"
                yield _Wish(_Rank.ROLLBACK if run in followed else _Rank.UNFOLLOWED_ROLLBACK, back, reason)


def _fit(
    needs: Mapping[str, Sequence[Need]],
    firm: Reasons,
    wishes: Sequence[_Wish],
    budget: _Budget,
    weights: Weights,
    undecided: int,
) -> tuple[Reasons, Reasons]:
    """Rules 6 and 7: what is kept, and which wishes were given up for the budget.

    Args:
        firm: what stays whatever the budget is.
        wishes: what the rules want besides, the first to go first.
        undecided: the bytes of versions without a verdict.
    """
    lesser = sum(wish.rank < _Rank.ROLLBACK for wish in wishes)

    def fits(count: int) -> bool:
        used = _used(_with_needs(firm, wishes[count:], needs), weights)
        return not budget.excess(used - undecided if count >= lesser else used)

    # Giving up one wish more never keeps more, so the first count that fits can be searched for by halves.
    first = bisect_left(range(len(wishes)), True, key=fits)
    kept = _with_needs(firm, wishes[first:], needs)
    limit, why = f"the disk budget of {budget.limit or 0:,} bytes", dict[str, list[str]]()
    for wish in reversed(wishes[:first]):
        if wish.rank <= _Rank.NEWEST_EVIDENCE:  # one wish a version: no other rule keeps evidence
            why[wish.record.id] = [f"evidence: {limit} has no room for it"]
        elif (reasons := why.get(wish.record.id)) is None:
            why[wish.record.id] = [f"given up for {limit}; it was kept because: {wish.reason}"]
        else:
            reasons[0] += f"; and because: {wish.reason}"
    return kept, why


def _with_needs(firm: Reasons, wishes: Sequence[_Wish], needs: Mapping[str, Sequence[Need]]) -> Reasons:
    kept = {version: list(reasons) for version, reasons in firm.items()}
    for wish in reversed(wishes):
        reasons = kept.setdefault(wish.record.id, [])
        if wish.reason not in reasons:
            reasons.append(wish.reason)
    queue = list(kept)
    while queue:
        for need in needs.get(queue.pop(), ()):
            if need.version not in kept:
                kept[need.version] = [need.reason]
                queue.append(need.version)
    return kept


def _used(kept: Iterable[str], weights: Weights) -> int:
    return sum(weights.get(version, _NOTHING).counted for version in kept)


def _superseded(versions: Iterable[VersionRecord]) -> set[str]:
    """Versions at or after the step at which a newer generation of their run has a good version."""
    sealed = [version for version in versions if version.state is VersionState.SEALED]
    starts: dict[tuple[str, int], int] = {}
    for version in sealed:
        key = (version.run, version.order.generation)
        starts[key] = min(version.order.step, starts.get(key, version.order.step))
    return {
        version.id
        for version in sealed
        for (run, generation), start in starts.items()
        if run == version.run and generation > version.order.generation and start <= version.order.step
    }


def _by_run(versions: Iterable[VersionRecord]) -> Iterator[tuple[str, list[VersionRecord]]]:
    ordered = sorted(versions, key=lambda version: (version.run, version.order), reverse=True)
    for run, group in groupby(ordered, key=lambda version: version.run):
        yield run, list(group)


def _why_dropped(version: VersionRecord, rules: KeepRules, superseded: Collection[str], closed: Collection[str]) -> str:
    if version.state.is_bad:
        return f"{version.state} more than {spoken(rules.rejected_for)} ago, and it is not needed"
    if version.state is VersionState.RETIRED:
        return "RETIRED: it is not needed"
    if version.barred:
        return f"{version.why_barred}, and it is not needed"
    if version.id in superseded:
        return f"run {version.run} was restarted at or before step {version.order.step}, and it is not needed"
    if version.run in closed:
        return f"run {version.run} is closed, and it is not needed"
    return f"not one of the newest {rules.last} good versions of run {version.run}, and it is not needed"
