"""Whether a version is served, and how a wait for it stands. Pure."""

from collections.abc import Iterable

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState, WaitOutcome


def is_proven(version: str, engines: Iterable[EngineRecord], quorum: int) -> bool:
    """Whether every reachable engine that is not quarantined serves `version`, and at least `quorum` do."""
    count = 0
    for engine in engines:
        if not engine.state.is_waited_for:
            continue
        # An engine that may still be paused holds it and does not serve it; one that is to be reloaded does not count.
        if not engine.known or engine.serving != version or engine.reload or engine.resume_owed:
            return False
        if engine.doubted is not None:
            return False
        count += 1
    return count >= quorum


def outcome_of(
    version: VersionRecord,
    target: VersionRecord | None,
    wait_for: WaitOutcome,
    *,
    proven: bool,
    refused: bool = False,
    offered: bool = False,
) -> WaitOutcome:
    """How a wait for `version` stands, given the run's target. `wait_for` is SERVED, SEALED or TAKEN.

    `proven` says whether the engines serve the target now: what was served once and is rolled back to is on its way.
    What was served once stays served while its files are there and engines go on to newer versions; of one whose files
    are gone that is only said while it is the target and proven: its step may have been published again, elsewhere.
    `refused`: it is a delta that cannot be carried out. `offered`: an engine may yet take it from its trainer's memory.
    """
    if wait_for is WaitOutcome.TAKEN:
        return WaitOutcome.PENDING if offered else WaitOutcome.TAKEN
    if version.barred and wait_for is WaitOutcome.SERVED:  # also where it was served before it was rolled back from
        return WaitOutcome.FAILED
    if version.served_at is not None and _holds(version, target, wait_for, proven=proven):
        return wait_for
    match version.state:
        case VersionState.LOST if version.served_at is not None and _is_overtaken(version, target):
            return WaitOutcome.SUPERSEDED
        case VersionState.REJECTED | VersionState.LOST:
            return WaitOutcome.FAILED
        case VersionState.RETIRED | VersionState.DELETED:
            return WaitOutcome.SUPERSEDED
        case VersionState.SEALED if wait_for is WaitOutcome.SEALED:
            return WaitOutcome.SEALED
        case VersionState.SEALED:
            if refused:
                return WaitOutcome.FAILED
            return WaitOutcome.SUPERSEDED if _is_overtaken(version, target) else WaitOutcome.PENDING
        case _:
            return WaitOutcome.PENDING


def _holds(version: VersionRecord, target: VersionRecord | None, wait_for: WaitOutcome, *, proven: bool) -> bool:
    """Whether what was served once still is what is waited for."""
    if wait_for is WaitOutcome.SEALED:
        return not version.handed or version.digest is not None
    if target is not None and target.id == version.id:
        return proven
    return not version.state.is_gone


def _is_overtaken(version: VersionRecord, target: VersionRecord | None) -> bool:
    return target is not None and target.order > version.order
