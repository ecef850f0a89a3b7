"""Which version a run's engines are to serve, and which versions they can be brought to. Pure.

The newest wins, by (generation, step) and never by clocks. A version that was rolled back from is barred; newer ones
roll out as usual. A step of an older generation is never newer than one of the current, whenever it was written.

Engines load full versions as they are, and deltas where a copy holds them. A delta that no copy can hold is skipped:
engines stay on what they have until another version comes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState


@dataclass(frozen=True, slots=True)
class LoadableDeltas:
    """`carried` maps the ids of deltas to the paths of copies that hold them, `refused` to the reason why none can.

    A delta that neither names is being written into a copy, or waits for one.
    """

    carried: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def can_load(self, version: VersionRecord) -> bool:
        """Whether engines find its files somewhere."""
        return version.kind is not Kind.DELTA or version.id in self.carried

    def is_refused(self, version: VersionRecord) -> bool:
        """Whether it cannot be carried out: engines stay on what they have until something else comes."""
        return version.id in self.refused

    def path_of(self, version: VersionRecord) -> str | None:
        """Where engines find its files, None where they find none now."""
        return version.path if version.kind is not Kind.DELTA else self.carried.get(version.id)


NOTHING = LoadableDeltas()


def choose_target(
    versions: Iterable[VersionRecord],
    finish: str | None = None,
    held: Collection[str] = (),
    carriage: LoadableDeltas = NOTHING,
) -> VersionRecord | None:
    """The version that the engines of a run are to serve, None while there is none that is good.

    One that was served, or that engines hold (`held`), stays the target when its files are lost, as some trainers
    delete them after the load: engines do not go backwards because of that, nor are they waited for in vain. So is one
    that engines took from their trainer's memory, whose files are not there yet, or never came.
    `finish` names one that stays the target as long as it can be loaded.
    """
    good = [version for version in versions if _is_good(version, held, carriage) and not version.barred]
    # Engines that do not serve the version to be finished must still be able to get there.
    sealed = [version for version in good if version.state is VersionState.SEALED and not carriage.is_refused(version)]
    unfinished = [version for version in sealed if version.id == finish]
    return max(unfinished or good, key=lambda version: version.order, default=None)


def _is_good(version: VersionRecord, held: Collection[str], carriage: LoadableDeltas) -> bool:
    was_taken = version.served_at is not None or version.id in held
    if version.state is VersionState.SEALED:
        return was_taken or not carriage.is_refused(version)
    if version.handed and (version.state.is_open or version.state is VersionState.REJECTED):
        return was_taken
    return version.state is VersionState.LOST and was_taken


def wanted(
    versions: Iterable[VersionRecord], finish: str | None = None, carriage: LoadableDeltas = NOTHING
) -> VersionRecord | None:
    """The version to have ready for engines: the target, unless its files are lost. A delta needs a copy first."""
    sealed = (version for version in versions if version.state is VersionState.SEALED and not version.barred)
    good = (version for version in sealed if carriage.can_load(version) or not carriage.is_refused(version))
    return max(good, key=lambda version: (version.id == finish, version.order), default=None)


def loadable(
    versions: Iterable[VersionRecord], finish: str | None = None, carriage: LoadableDeltas = NOTHING
) -> VersionRecord | None:
    """The newest version that an engine can be brought to now: what is wanted, or one before it while that waits for a
    copy. One after it would take the engine past a version that is to be finished first, which then never is.
    """
    known = list(versions)
    goal = wanted(known, finish, carriage)
    if goal is None:
        return None
    return wanted((v for v in known if v.order <= goal.order and carriage.can_load(v)), finish, carriage)


def last_good(versions: Iterable[VersionRecord], carriage: LoadableDeltas | None = None) -> VersionRecord | None:
    """The newest version that was served before; with `carriage`, that an engine can be brought back to at once."""
    sealed = (v for v in versions if v.state is VersionState.SEALED and (carriage is None or carriage.can_load(v)))
    good = (version for version in sealed if version.served_at is not None)
    return max((v for v in good if not v.barred), key=lambda version: version.order, default=None)


def last_good_before(versions: Iterable[VersionRecord], current: VersionRecord) -> VersionRecord | None:
    """Where a rollback from `current` goes: the newest version before it that engines have served."""
    return last_good(version for version in versions if version.order < current.order)


def unserved_before(versions: Iterable[VersionRecord], current: VersionRecord) -> list[VersionRecord]:
    """Where a rollback could go besides: good versions before `current` that no engine has proved, newest first."""
    good = (v for v in versions if v.state is VersionState.SEALED and not v.barred and v.served_at is None)
    return sorted((v for v in good if v.order < current.order), key=lambda version: version.order, reverse=True)


def to_bar(versions: Sequence[VersionRecord], goal: VersionRecord) -> list[VersionRecord]:
    """What a rollback bars: all that is newer than its goal, so that the goal becomes the newest."""
    return [version for version in versions if version.order > goal.order and not version.barred]


def skipped_between(
    versions: Iterable[VersionRecord], serving: VersionRecord | None, target: VersionRecord
) -> list[VersionRecord]:
    """The good versions that an engine passes over when it goes straight from what it serves to the target."""
    if serving is None or serving.run != target.run:
        return []
    return [v for v in versions if v.state is VersionState.SEALED and serving.order < v.order < target.order]
