"""What past updates amount to: percentiles over their loads, and the times for which an engine was away. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import median

from refitd.engine.port import Outcome, Stage
from refitd.state.records import AttemptRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.history import EnginePast, Outage, PastLoad, PastUpdate, Spread
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState, Kind
from refitd_client.contract.wire import Event

STANDSTILL = tuple(stage.value for stage in (Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME))


def spread(values: Iterable[float]) -> Spread | None:
    found = sorted(values)
    if not found:
        return None
    rank = math.ceil(0.95 * len(found)) - 1
    return Spread(count=len(found), p50=median(found), p95=found[rank], most=found[-1])


def past_update(version: VersionRecord, loads: Sequence[AttemptRecord]) -> PastUpdate:
    """Sum up the loads of a version, which are in the order in which they began."""
    ended = [load for load in loads if load.outcome is not None]
    taken = [load for load in ended if load.outcome == Outcome.ACK.name]
    return PastUpdate(
        id=version.id,
        run=version.run,
        generation=version.order.generation,
        step=version.order.step,
        kind=Kind.HANDOVER if version.handed else version.kind,
        state=version.state,
        created_at=version.created_at,
        served_at=version.served_at,
        reason=version.reason,
        bytes=version.files.bytes,
        density=version.announced.density,
        why_full=version.announced.why_full,
        timings=version.career.timings,
        loads=len(loads),
        done=dict(Counter((load.kind or version.kind).value for load in taken)),
        failed=dict(Counter(load.outcome for load in ended if load.outcome and _has_failed(load))),
        pause=spread(pause for load in taken if (pause := _standstill(load)) is not None),
        served=spread(_until_served(version, taken)),
    )


def _has_failed(load: AttemptRecord) -> bool:
    """Whether a load that has ended failed. An engine that declines a hand-over waits for the files, and loads them."""
    declined = load.kind is Kind.HANDOVER and load.outcome == Outcome.NACK.name
    return load.outcome != Outcome.ACK.name and not declined


def _until_served(version: VersionRecord, taken: Sequence[AttemptRecord]) -> Iterable[float]:
    """Milliseconds from the start of publishing until each engine was done with its first load of the version.

    A load that began after the version was served everywhere is a repair or of an engine that came back: how long that
    was away says nothing of the update.
    """
    # A version that was handed over is known before its publisher has begun to write.
    began = _instant(version.created_at) - (0.0 if version.handed else version.career.timings.get("publish", 0.0))
    seen: set[str] = set()
    for load in taken:
        is_late = version.served_at is not None and load.started_at > version.served_at
        if load.engine not in seen and not is_late:
            yield max(0.0, _instant(load.started_at) + sum(load.timings.values()) - began)
        seen.add(load.engine)


def _standstill(load: AttemptRecord) -> float | None:
    """For how long an engine stood still. None where the load paused nothing: an adapter is loaded while the engine
    goes on, and a host that was ordered to a version pauses its engines itself, for a part of the time of the order.
    """
    if Stage.PAUSE.value not in load.timings:
        return None
    return sum(load.timings.get(stage, 0.0) for stage in STANDSTILL)


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1000


def engine_past(engine: str, loads: Sequence[AttemptRecord], events: Iterable[Event], *, more: bool) -> EnginePast:
    """The past of an engine by its id: its loads and the entries of the log about it, the oldest first. `more`: it has
    older loads.
    """
    return EnginePast(engine=engine, loads=[_past_load(load) for load in loads], outages=outages(events), more=more)


def _past_load(load: AttemptRecord) -> PastLoad:
    parsed = parse_version_id(load.version)
    ended = load.outcome is not None
    return PastLoad(
        version=load.version,
        step=None if parsed is None else parsed[1].step,
        at=load.started_at,
        ms=sum(load.timings.values()) if ended else None,
        pause=_standstill(load) if ended else None,
        outcome=load.outcome,
        kind=load.kind,
        reason=load.reason,
    )


def outages(events: Iterable[Event]) -> list[Outage]:
    """The times for which an engine was away, from the log about it, the oldest first.

    One that goes from one such state into another has two, one after the other. An engine with unknown contents is away
    until a load of it has succeeded.
    """
    found: list[Outage] = []
    current: Outage | None = None
    for event in events:
        state = EngineState.__members__.get(event.data.get("state", ""))
        is_repair = state is not None and state.is_loading
        if current is not None and (state is current.state or (current.state.stays_paused and is_repair)):
            continue
        if current is not None:
            found.append(replace(current, until=event.at))
        current = None
        if state is not None and state.is_in_trouble and state is not EngineState.NACKED:
            current = Outage(state=state, since=event.at, reason=event.text)
    return found if current is None else [*found, current]
