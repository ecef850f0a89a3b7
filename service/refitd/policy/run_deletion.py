"""Whether a run may be deleted. Pure.

A deletion takes all that is known of a run, so whoever may still need any of it refuses it: a publisher that is alive,
an engine, a pin, a version without a verdict, a trainer's own folder. Collection asks again before each folder.
"""

from collections.abc import Collection, Iterable, Sequence

from refitd.policy.leases import LeaseKind, Views, leases, reasons_of
from refitd.state.version import VersionRecord
from refitd.text import listed

_OF_THE_RUN = frozenset({LeaseKind.TARGET, LeaseKind.LAST_GOOD, LeaseKind.NEXT, LeaseKind.ROLLBACK})


def why_not_deleted(
    run: str, versions: Sequence[VersionRecord], views: Views, spared: Collection[str], *, is_published: bool
) -> str | None:
    """Why a run may not be deleted, and what to do, in a sentence without a full stop. None if it may.

    Args:
        run: the run.
        versions: its versions.
        views: what leases are derived from.
        spared: the paths of its versions whose folders are their trainer's to delete.
        is_published: whether a publisher holds it.
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
    if pinned := _ids(version for version in versions if version.pinned):
        return f"pinned: {listed(pinned)}. Take the pins away first ('refitd unpin ID')"
    if without := _ids(version for version in versions if version.state.awaits_verdict):
        return f"no verdict yet: {listed(without)}. Wait for it ('refitd wait ID --for sealed')"
    if spared:
        return (
            f"only its trainer deletes {listed(sorted(spared))}: delete these folders by hand first, or start the "
            "service with --reclaim-foreign"
        )
    return None


def _ids(versions: Iterable[VersionRecord]) -> list[str]:
    return [version.id for version in versions]
