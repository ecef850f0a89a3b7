"""Which versions are pushed to an object store, in which order, and which of them followers are to serve. Pure."""

from collections.abc import Collection, Iterable, Sequence

from refitd.policy.strategy import Strategy, StrategyName, is_through
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.bucket.pointer import Pointer, order_of
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState


def to_push(versions: Iterable[VersionRecord], newest: Order | None, counting: Collection[str]) -> list[VersionRecord]:
    """Return the versions of a run to push, oldest first.

    Those that no follower needs are skipped: what is older than the newest full version. A delta goes after its base;
    one whose base is neither in the store nor about to be is left out, and so is what stands on it. `newest` is the
    newest version that counts in the store, None where none does, and `counting` are the ids of all that count there.
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


def for_followers(
    pointer: Pointer, wanted: VersionRecord | None, known: Iterable[VersionRecord]
) -> VersionRecord | None:
    """What followers of the store are to serve at most: what engines here are to, or a newer version whose files are
    lost here alone. Nothing is wrong with that one in the store, so followers do not go back, as engines here do not.

    It was served here, or followers were told to serve it. To any other that is lost here they do not go on. `wanted`
    is the version with files that engines here are to serve, None where that is not known. `known` are the versions of
    the run that may be served here, and those that were lost and are deleted.
    """
    there = {each.id: each.digest for each in pointer.versions if not each.barred}
    told = pointer.desired or pointer.target
    lost = (each for each in known if _is_only_lost(each) and each.digest == there.get(each.id, ""))
    stay = [each for each in lost if each.served_at is not None or each.id == told]
    return max([*stay, *filter(None, [wanted])], key=lambda version: version.order, default=None)


def wanted_there(
    pointer: Pointer,
    wanted: VersionRecord | None,
    update: UpdateRecord | None,
    strategy: Strategy,
    engines: Sequence[EngineRecord],
) -> str | None:
    """The id of the version that followers of the store are to serve: what engines here are to serve.

    A newer one than theirs waits while the run's updates are paused here, and until a canary here has passed its check.
    The first version of a run waits for nothing. Where all that is there is barred, followers are to stay, and the next
    version waits like any other. `wanted` is what followers are to serve at most, None where that is not known, and
    they stay.
    """
    there = pointer.desired or pointer.target
    if wanted is None or there is None or wanted.order <= order_of(there):
        return None if wanted is None else wanted.id
    if update is not None and update.paused_since is not None:
        return there
    has_passed = update is not None and is_through(strategy, wanted, update)
    has_canary = strategy.name is StrategyName.CANARY and bool(engines)
    return there if has_canary and not has_passed else wanted.id


def missing_there(pointer: Pointer, wanted: VersionRecord | None, waiting: Collection[str]) -> str | None:
    """A sentence, where what engines here are to serve is not in the store and will not come; None where all is well.
    `waiting` are the ids of versions that are about to be pushed.
    """
    if wanted is None or wanted.in_memory or wanted.id in waiting:
        return None
    if any(each.id == wanted.id and each.digest == wanted.digest for each in pointer.versions):
        return None
    stay = (
        f"followers of the store stay on what they have: engines here are to serve {wanted.id}, which is not in the "
        "store"
    )
    if not wanted.files.owned:
        return f"{stay}: it has no manifest of a refitd publisher, and only versions with one are pushed"
    return f"{stay} any more, or never was. Publish a newer step; one more than --keep-last stay there"


def left_behind(
    pointer: Pointer,
    wanted: VersionRecord | None,
    deleted: Collection[str],
    known: Iterable[VersionRecord] = (),
) -> frozenset[str]:
    """The ids of versions that a rollback here has left and that are deleted here, so that no record says it: followers
    would take the newest of them for good. Of those that were lost the records do say it. `wanted` and `known` are as
    in `for_followers`, `deleted` are the ids of versions that this service has deleted.
    """
    if wanted is None:
        return frozenset()
    left = set(deleted) - {version.id for version in known if _is_only_lost(version)}
    return frozenset(each.id for each in pointer.versions if each.id in left and each.order > wanted.order)


def without_files(versions: Iterable[VersionRecord]) -> VersionRecord | None:
    """The newest of a run, if its trainer wants no files of it: one without files is not pushed."""
    newest = max(versions, key=lambda version: version.order, default=None)
    if newest is None or not (newest.in_memory and newest.state.is_open) or newest.durability is None:
        return None
    return newest


def _is_whole(version: VersionRecord) -> bool:
    """Whether its files are good and have the publisher's manifest."""
    return version.state is VersionState.SEALED and version.files.owned and version.digest is not None


def _is_only_lost(version: VersionRecord) -> bool:
    """Whether nothing is wrong with it but that its files are lost here."""
    return version.is_lost and not version.barred
