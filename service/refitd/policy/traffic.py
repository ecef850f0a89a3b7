"""Whether a version is served, how a wait for it stands, and whether requests may go to an engine. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome


def is_proven(version: str, engines: Iterable[EngineRecord], quorum: int) -> bool:
    """Whether every reachable engine that is not quarantined serves `version`, and at least `quorum` do."""
    count = 0
    for engine in engines:
        if not engine.state.is_waited_for:
            continue
        # An engine that may still be paused holds it and does not serve it; one that is to be reloaded does not count.
        if not engine.known or engine.serving != version or engine.debts.reload or engine.debts.resume_owed:
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

    What was served once stays served while its files are there and engines go on to newer versions. Of a version whose
    files
    are gone that is only said while it is the target: its step may have been published again, elsewhere.

    Args:
        proven: whether engines serve the target now; what is rolled back to is on its way.
        refused: it is a delta that cannot be carried out.
        offered: an engine may yet take it from its trainer's memory.
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
    if wait_for is WaitOutcome.SEALED:
        return not version.handed or version.digest is not None
    if target is not None and target.id == version.id:
        return proven
    return not version.state.is_gone


def _is_overtaken(version: VersionRecord, target: VersionRecord | None) -> bool:
    return target is not None and target.order > version.order


_PASSING = {
    EngineState.PROBING: "has not answered yet since the service was started",
    EngineState.UPDATING: "is being updated",
    EngineState.VERIFYING: "is being updated",
}
_OUT = {
    EngineState.UNREACHABLE: "does not answer",
    EngineState.TAINTED: "has unknown contents",
    EngineState.QUARANTINED: "was left with unknown contents",
    EngineState.CONTESTED: "is changed by another writer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an engine has to serve so that requests may go to it.

    Attributes:
        run: the run; None for the engine's own.
        max_behind: how many of the trainer's steps the engine may be behind its run's target; None for any number.
        step: the step that it has to serve; None for any.
        or_later: whether a later step will do as well.
    """

    run: str | None = None
    max_behind: int | None = None
    step: int | None = None
    or_later: bool = False


def shut(
    engine: EngineRecord, serving: VersionRecord | None, target: VersionRecord | None, demand: Demand
) -> str | None:
    """Why no requests may go to an engine, as a sentence without its subject; None where they may."""
    return _out_of_service(engine) or _other(engine, serving, target, demand) or _PASSING.get(engine.state)


def _out_of_service(engine: EngineRecord) -> str | None:
    if (word := _OUT.get(engine.state)) is not None:
        return f"{word}: {engine.reason}" if engine.reason else word
    if not engine.known:
        return "has unknown contents, and is being repaired"
    if engine.debts.resume_owed and not engine.state.is_loading:
        return "may still be paused"
    if (others := engine.of_others) is not None:
        return f"serves {others}"
    return "is to be loaded again" if engine.debts.reload else None


def _other(
    engine: EngineRecord, serving: VersionRecord | None, target: VersionRecord | None, demand: Demand
) -> str | None:
    parsed = parse_version_id(engine.serving or "")
    if parsed is None:
        return "serves no version yet"
    run, order = parsed
    if demand.run is not None and demand.run != engine.run:
        return f"follows {engine.run or 'no run'}, not {demand.run}"
    if serving is not None and serving.barred:  # also where that leaves its run without a target
        return f"serves {engine.serving}, which is barred: {serving.why_barred}"
    if target is None:
        return f"serves {engine.serving}, and {_lacks_target(engine)}"
    if run != target.run or order.generation != target.order.generation:
        return f"serves {engine.serving}, which is not of the newest generation of {engine.run}"
    return _other_step(order, target.order, demand)


def _lacks_target(engine: EngineRecord) -> str:
    return "follows no run" if engine.run is None else f"run {engine.run} has no good version"


def _other_step(order: Order, target: Order, demand: Demand) -> str | None:
    behind = steps_from(order, target)
    if demand.max_behind is not None and behind > demand.max_behind:
        return f"serves step {order.step}, {behind} behind step {target.step}"
    if demand.step is None or order.step == demand.step or (demand.or_later and order.step > demand.step):
        return None
    return f"serves step {order.step}, not {demand.step}{' or a later one' if demand.or_later else ''}"


def steps_from(order: Order, target: Order) -> int:
    """The trainer's steps from one version to the target, of one generation; 0 for one that is past it."""
    return max(0, target.step - order.step)
