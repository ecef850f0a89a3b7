"""Whether requests may go to an engine: what routers, readiness probes and trainers that want a version ask. Pure.

The answer is as fresh as the service's knowledge of the engine: its last load, and its last probe.
"""

from dataclasses import dataclass

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import EngineState

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
        run: the run; None for the one that the engine follows.
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
    """Decide why no requests may go to an engine, as a sentence without its subject; None where they may.

    Args:
        engine: the engine.
        serving: the record of what it serves, where there is one.
        target: the target of its run.
        demand: what it has to serve.
    """
    return _out_of_service(engine) or _other(engine, serving, target, demand) or _PASSING.get(engine.state)


def _out_of_service(engine: EngineRecord) -> str | None:
    """Why it takes no requests, or nothing is known of its answers."""
    if (word := _OUT.get(engine.state)) is not None:
        return f"{word}: {engine.reason}" if engine.reason else word
    if not engine.known:
        return "has unknown contents, and is being repaired"
    if engine.resume_owed and not engine.state.is_loading:
        return "may still be paused"
    if (others := engine.of_others) is not None:
        return f"serves {others}"
    return "is to be loaded again" if engine.reload else None


def _other(
    engine: EngineRecord, serving: VersionRecord | None, target: VersionRecord | None, demand: Demand
) -> str | None:
    """Why what it serves is not what is demanded."""
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
