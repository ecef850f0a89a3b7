"""What a version needs: others that must stay on disk for as long as it does. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from refitd.state.version import VersionRecord
from refitd_client.contract.naming import version_folder
from refitd_client.contract.states import VersionState


@dataclass(frozen=True, slots=True)
class Need:
    """The id of a version that must stay, and the reason as a sentence about it."""

    version: str
    reason: str


def needs_of(versions: Sequence[VersionRecord]) -> dict[str, list[Need]]:
    """Map the ids of versions to what they need: the base of a delta, and versions whose folders overlap with theirs.

    A base is named by its id, or by its folder in the same run. A delta that is rejected or lost is never carried out:
    it needs nothing. One that is RETIRED does: what still keeps it is an engine that reads it. The base of a base
    follows, down to a full version.
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
