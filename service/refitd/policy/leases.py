"""Leases: who still needs a version, and why. Pure: observations in, leases out; nothing stored, so nothing stale.

A lease is derived each time from what is true now. So none can be left over, and a crash loses none. The worked case is
an engine that gets slower and dies while it loads version 7:

    serves 6, loads 7            6 SERVING (it answers from it), 7 LOADING
    load timed out               7 UNPROVEN: a server goes on loading after its client hung up
    unreachable for 600 s        6 is free again: a dead engine pins nothing for ever
    still no proof about 7       7 stays UNPROVEN, until its load or its process is proved to have ended
    removed from the fleet       7 stays UNPROVEN for 600 s more: then it may be deleted, and is never written over

A deletion takes all that is known of a run, so a publisher that is alive, an engine, a pin, a version without a verdict
and a trainer's own folder refuse it. Collection asks again before each folder.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from refitd.state.version import VersionRecord
from refitd.text import FEW, listed
from refitd_client.contract.states import EngineState

DEAD_AFTER = 600.0


class LeaseKind(Enum):
    SERVING = auto()
    LOADING = auto()
    UNPROVEN = auto()
    NAMED = auto()
    BENEATH = auto()
    TARGET = auto()
    LAST_GOOD = auto()
    ROLLBACK = auto()
    VALIDATING = auto()
    NEXT = auto()
    COPYING = auto()
    PULLING = auto()
    UPSTREAM = auto()
    PUSHING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One reason why a version must stay. `holder` is an engine's or run's name; `since` is for display (RFC 3339).

    `unseen`: the holder is an engine that does not answer.
    """

    kind: LeaseKind
    holder: str
    since: str | None = None
    unseen: bool = False

    def __str__(self) -> str:
        return self.claims[0].format(self.holder) + (f" (since {self.since})" if self.since else "")

    @property
    def claims(self) -> tuple[str, str | None]:
        return _UNSEEN if self.unseen and self.kind is LeaseKind.SERVING else _CLAIMS[self.kind]


# A sentence for one holder, and for many.
_CLAIMS: dict[LeaseKind, tuple[str, str | None]] = {
    LeaseKind.SERVING: ("engine {} serves it", "{} engines serve it: {}"),
    LeaseKind.LOADING: ("engine {} loads it", "{} engines load it: {}"),
    LeaseKind.UNPROVEN: (
        "engine {} may still be reading it: its load timed out and nothing proved that it ended",
        "{} engines may still be reading it, as nothing proved that their loads ended: {}",
    ),
    LeaseKind.NAMED: (
        "engine {} names its folder as what it serves, and may read it again",
        "{} engines name its folder as what they serve, and may read it again: {}",
    ),
    LeaseKind.BENEATH: (
        "engine {} serves deltas that were written into it, and would be put back from it",
        "{} engines serve deltas that were written into it, and would be put back from it: {}",
    ),
    LeaseKind.TARGET: ("target of run {}", None),
    LeaseKind.LAST_GOOD: ("last good version of run {}", None),
    LeaseKind.ROLLBACK: ("run {} is being rolled back to it", None),
    LeaseKind.VALIDATING: ("the {} is validating it", None),
    LeaseKind.NEXT: ("engines of run {} go to it until its target can be loaded", None),
    LeaseKind.COPYING: ("the {} makes a copy from it for engines", None),
    LeaseKind.PULLING: ("follower {} pulls it", "{} followers pull it: {}"),
    LeaseKind.UPSTREAM: ("the {} wants it to be here", None),
    LeaseKind.PUSHING: ("it is being pushed to the {}", None),
}
_UNSEEN = (
    "engine {}, which does not answer, may still serve it",
    "{} engines, which do not answer, may still serve it: {}",
)


def reasons_of(held: Sequence[Lease]) -> list[str]:
    """The leases as sentences about the version; one sentence for many holders of a kind."""
    alike: dict[tuple[LeaseKind, bool], list[Lease]] = {}
    for lease in held:
        alike.setdefault((lease.kind, lease.unseen), []).append(lease)
    found: list[str] = []
    for group in alike.values():
        claim = group[0].claims[1]
        if claim is None or len(group) <= FEW:
            found += [str(lease) for lease in group]
        else:
            found.append(claim.format(f"{len(group):,}", listed([lease.holder for lease in group])))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load that is not proved to have ended. `unproven`: it timed out, its connection broke, or the service stopped
    in
    the middle of it.
    """

    version: str
    unproven: bool = False
    since: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine as it looks now. Versions are ids; `unreachable_for` is seconds of the monotonic clock.

    `named` are the versions whose folders it may mean when it says what it serves: servers read such folders again.
    `beneath` is the full version that refitd's plugin has mapped, while deltas on it are served. `is_removed`: it has
    not
    been named for `unreachable_for` seconds, and cannot be asked for a proof.
    """

    id: str
    run: str | None
    state: EngineState
    serving: str | None = None
    loads: tuple[Load, ...] = ()
    named: tuple[str, ...] = ()
    beneath: str | None = None
    unreachable_for: float = 0.0
    is_removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run as it looks now. `rolling_back`: `target` was reached backwards and not by all engines yet.

    `loadable` is what engines go to while the target is a delta that waits for its copy. `is_closed`: it has ended.
    """

    run: str
    target: str | None = None
    loadable: str | None = None
    last_good: str | None = None
    rolling_back: bool = False
    is_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """All that leases are made of, versions by their ids. `upstream` must be here since an upstream wants them or what
    stands on them. `pulling` has pairs of a follower's name and a version.
    """

    engines: tuple[EngineView, ...] = ()
    runs: tuple[RunView, ...] = ()
    validating: tuple[str, ...] = ()
    copying: tuple[str, ...] = ()
    pulling: tuple[tuple[str, str], ...] = ()
    upstream: tuple[str, ...] = ()
    pushing: tuple[str, ...] = ()

    @property
    def closed(self) -> set[str]:
        return {run.run for run in self.runs if run.is_closed}


def leases(views: Views, *, dead_after: float = DEAD_AFTER) -> dict[str, list[Lease]]:
    """Map the id of each version that is needed to the reasons.

    An engine that was unreachable for `dead_after` seconds pins nothing but what it may still be reading.
    """
    found: dict[str, list[Lease]] = {}
    for version, lease in _all(views, dead_after):
        found.setdefault(version, []).append(lease)
    return found


def _all(views: Views, dead_after: float) -> Iterator[tuple[str, Lease]]:
    for engine in views.engines:
        yield from _of_engine(engine, dead_after)
    followed = {engine.run for engine in views.engines if not engine.is_removed}
    for run in views.runs:
        if not run.is_closed or run.run in followed:  # else no engine goes to its target any more
            yield from _of_run(run)
    for follower, version in views.pulling:
        yield version, Lease(kind=LeaseKind.PULLING, holder=follower)
    for kind, holder, ids in (
        (LeaseKind.VALIDATING, "catalog", views.validating),
        (LeaseKind.COPYING, "copier", views.copying),
        (LeaseKind.UPSTREAM, "upstream", views.upstream),
        (LeaseKind.PUSHING, "object store", views.pushing),
    ):
        yield from ((version, Lease(kind=kind, holder=holder)) for version in ids)


def _of_engine(engine: EngineView, dead_after: float) -> Iterator[tuple[str, Lease]]:
    if engine.is_removed and engine.unreachable_for >= dead_after:
        return
    for load in engine.loads:
        # An engine that cannot be reached cannot be seen to load: whatever was under way has lost its witness.
        unproven = load.unproven or engine.state is EngineState.UNREACHABLE
        kind = LeaseKind.UNPROVEN if unproven else LeaseKind.LOADING
        yield load.version, Lease(kind=kind, holder=engine.id, since=load.since)
    if engine.unreachable_for >= dead_after:
        return
    if engine.serving is not None:
        unseen = engine.state is EngineState.UNREACHABLE
        yield engine.serving, Lease(kind=LeaseKind.SERVING, holder=engine.id, unseen=unseen)
    if engine.beneath is not None:
        yield engine.beneath, Lease(kind=LeaseKind.BENEATH, holder=engine.id)
    for version in engine.named:
        if version != engine.serving:
            yield version, Lease(kind=LeaseKind.NAMED, holder=engine.id)


def _of_run(run: RunView) -> Iterator[tuple[str, Lease]]:
    if run.target is not None:
        kind = LeaseKind.ROLLBACK if run.rolling_back else LeaseKind.TARGET
        yield run.target, Lease(kind=kind, holder=run.run)
    if run.loadable is not None and run.loadable != run.target:
        yield run.loadable, Lease(kind=LeaseKind.NEXT, holder=run.run)
    if run.last_good is not None:
        yield run.last_good, Lease(kind=LeaseKind.LAST_GOOD, holder=run.run)


_OF_THE_RUN = frozenset({LeaseKind.TARGET, LeaseKind.LAST_GOOD, LeaseKind.NEXT, LeaseKind.ROLLBACK})


def why_not_deleted(
    run: str, versions: Sequence[VersionRecord], views: Views, spared: Collection[str], *, is_published: bool
) -> str | None:
    """Why a run may not be deleted, and what to do, in a sentence without a full stop. None if it may.

    Args:
        spared: the paths of its versions whose folders are their trainer's to delete.
    """
    if is_published:
        return f"a publisher holds run {run}: end its trainer, or close the publisher"
    if following := [each.id for each in views.engines if each.run == run and not each.is_removed]:
        verb = "follows" if len(following) == 1 else "follow"
        return (
            f"{listed(following)} {verb} run {run}: bring engines to another run, which need not have a version yet "
            "('refitd engines move ID --run RUN'); delete this one when they serve that. An engine that is gone: "
            "'refitd engines remove ID'"
        )
    held = leases(views)
    for version in versions:
        if needed := reasons_of([lease for lease in held.get(version.id, ()) if lease.kind not in _OF_THE_RUN]):
            return f"{version.id} is needed ({needed[0]}): delete the run when that is over"
    if pinned := [version.id for version in versions if version.pinned]:
        return f"pinned: {listed(pinned)}. Take the pins away first ('refitd unpin ID')"
    if without := [version.id for version in versions if version.state.awaits_verdict]:
        return f"no verdict yet: {listed(without)}. Wait for it ('refitd wait ID --for sealed')"
    if spared:
        return (
            f"only its trainer deletes {listed(sorted(spared))}: delete these folders by hand first, or start the "
            "service with --reclaim-foreign"
        )
    return None
