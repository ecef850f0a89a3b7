"""Which versions are pushed to an object store, and in which order. Pure."""

from collections.abc import Collection, Iterable

from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState


def to_push(versions: Iterable[VersionRecord], newest: Order | None, counting: Collection[str]) -> list[VersionRecord]:
    """Return the versions of a run to push, oldest first.

    Those that no follower needs are skipped: what is older than the newest full version. A delta goes after its base;
    one whose base is neither in the store nor about to be is left out, and so is what stands on it.

    Args:
        versions: of the run, as this service knows them.
        newest: the newest version that counts in the store, None where none does.
        counting: the ids of all that count there.
    """
    good = sorted((each for each in versions if _is_whole(each)), key=lambda version: version.order)
    later = [version for version in good if newest is None or version.order > newest]
    full = [version.order for version in later if version.kind is not Kind.DELTA and not version.barred]
    first = max(full, default=None)
    there = set(counting)
    chosen: list[VersionRecord] = []
    for version in later:
        if version.barred or (first is not None and version.order < first):
            continue
        if version.kind is not Kind.DELTA or version.base in there:
            chosen.append(version)
            there.add(version.id)
    return chosen


def without_files(versions: Iterable[VersionRecord]) -> VersionRecord | None:
    """The newest of a run, if its trainer wants no files of it: what has none is not pushed. None where it wants some.

    Args:
        versions: of the run, as this service knows them.
    """
    newest = max(versions, key=lambda version: version.order, default=None)
    if newest is None or not (newest.in_memory and newest.state.is_open) or newest.durability is None:
        return None
    return newest


def _is_whole(version: VersionRecord) -> bool:
    """Whether its files are good and have the publisher's manifest."""
    return version.state is VersionState.SEALED and version.owned and version.digest is not None
