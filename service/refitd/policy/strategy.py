"""Which engines may go to the target now, and what becomes of the others when one breaks. Pure.

    all       every engine at once. One that breaks is repaired beside the others: they go on.
    rolling   at most `max_unavailable` engines out of service at a time, in the order of their names. One that breaks
              takes a place until it is repaired, restarted or removed: the others wait.
    canary    one engine first, and a check. If either fails the version is barred and the canary goes back to the last
              good one, which the others have never left.

An engine that may not go yet stays on, or is brought to, the last good version, so that the fleet serves no mix of
versions that was not ordered. An engine that cannot be reached takes no place, nor one that another writer loads. A
host
that its own operator has paused (it `waits`) holds up no others, and is the canary only where it was named.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from refitd.state.records import CheckState, EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, UpdateState

GIVE_UP_AFTER = 3  # refusals of a canary, failures for which a newer version is kept waiting, strikes of a version
CANARY_STRIKES = 2


class StrategyName(StrEnum):
    ALL = "all"
    ROLLING = "rolling"
    CANARY = "canary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The operator's choice. `canary` is an engine's id, None for the first by name."""

    name: StrategyName = StrategyName.ALL
    max_unavailable: int = 1
    canary: str | None = None

    def __str__(self) -> str:
        more = self.canary if self.name is StrategyName.CANARY else self.max_unavailable
        plain = Strategy(name=self.name)
        return self.name.value if self == plain else f"{self.name}:{more}"


def strategy_of(text: str) -> Strategy:
    """Read a strategy: `all`, `rolling`, `rolling:2`, `canary`, `canary:ENGINE`.

    Raises:
        ValueError: it is none.
    """
    word, _, more = text.strip().partition(":")
    if word == StrategyName.CANARY:
        return Strategy(name=StrategyName.CANARY, canary=more or None)
    if word == StrategyName.ROLLING and (not more or (more.isdecimal() and int(more) > 0)):
        return Strategy(name=StrategyName.ROLLING, max_unavailable=int(more or 1))
    if word == StrategyName.ALL and not more:
        return Strategy()
    raise ValueError(f"{text!r} is none of 'all', 'rolling', 'rolling:N' (1 or more), 'canary' and 'canary:ENGINE'")


def released(
    strategy: Strategy,
    target: VersionRecord,
    update: UpdateRecord | None,
    engines: Sequence[EngineRecord],
    *loadable: VersionRecord | None,
) -> frozenset[str]:
    """The ids of the engines of a run that may be brought to its target now. One that has come to one of `loadable`
    can go no further now: the target is lost, or a copy for it is still to come.
    """
    match strategy.name:
        case StrategyName.ALL:
            return frozenset(engine.id for engine in engines)
        case StrategyName.ROLLING:
            there = {version.id for version in loadable if version is not None}
            return _in_turn(strategy.max_unavailable, target, there, engines)
        case StrategyName.CANARY:
            # What was served once needs no check: it is where a failed check returns to.
            if target.served_at is not None or _checked(update, target) is CheckState.PASSED:
                return frozenset(engine.id for engine in engines)
            canary = canary_of(strategy, target, engines)
            return frozenset() if canary is None else frozenset({canary.id})
        case _:
            assert_never(strategy.name)


def _in_turn(
    places: int, target: VersionRecord, loadable: Collection[str], engines: Sequence[EngineRecord]
) -> frozenset[str]:
    """Engines out of service have a place; what is left goes to those that wait, in the order of their names. One that
    is to be loaded again with a target that cannot be loaded waits for that, and for no place.

    The result depends on what is true now alone, so engines that ask one after the other get the same answer.
    """
    out = {engine.id for engine in engines if engine.state.is_out_of_service}
    there = {engine.id for engine in engines if engine.to_load.serving in {target.id, *loadable}}
    if target.id not in loadable:
        there |= {engine.id for engine in engines if engine.serving == target.id}
    waiting = [engine for engine in engines if engine.id not in out | there and not engine.state.is_out_of_reach]
    waiting.sort(key=lambda engine: (engine.waits is not None, engine.id))
    return frozenset(out | there | {engine.id for engine in waiting[: max(places - len(out), 0)]})


def canary_of(strategy: Strategy, target: VersionRecord, engines: Iterable[EngineRecord]) -> EngineRecord | None:
    """The engine that goes first: the named one, else one that is there already, else the first by name."""
    able = [e for e in engines if not e.state.is_out_of_reach and e.state is not EngineState.QUARANTINED]
    named = [engine for engine in able if engine.id == strategy.canary]
    able = [engine for engine in able if engine.waits is None or engine.serving == target.id]
    return min(named or able, key=lambda engine: (not _went(engine, target), engine.id), default=None)


def _went(engine: EngineRecord, target: VersionRecord) -> bool:
    return engine.trouble.last_attempt is not None and engine.trouble.last_attempt.version == target.id


def fault_found(
    strategy: Strategy, target: VersionRecord, update: UpdateRecord, engines: Sequence[EngineRecord]
) -> str | None:
    """Why the target is to be barred, None where it is not.

    A canary failed the check. Or it broke or refused the target for good, and no engine serves the target. Or, without
    canaries, the loads of it have left every engine that can be reached with unknown contents too often.
    """
    if target.served_at is not None:
        return None
    if strategy.name is not StrategyName.CANARY:
        able = [engine for engine in engines if not engine.state.is_out_of_reach]
        if not able or not all(has_given_up(engine, target) for engine in able):
            return None
        return f"no engine came through a load of it: {', '.join(sorted(engine.id for engine in able))}"
    if _checked(update, target) is CheckState.FAILED:
        return update.reason
    if any(engine.known and engine.serving == target.id for engine in engines):
        return None  # that engine came through a load: what is wrong is the canary, not the version
    faults = (_load_fault(engine, target) for engine in engines if _went(engine, target))
    return next((fault for fault in faults if fault is not None), None)


def has_given_up(engine: EngineRecord, version: VersionRecord) -> bool:
    """Whether this engine is not brought to the version again: its loads have left unknown contents too often."""
    return engine.trouble.strikes.get(version.id, 0) >= GIVE_UP_AFTER


def _load_fault(canary: EngineRecord, target: VersionRecord) -> str | None:
    """Why a canary refutes the target, None where it does not. One failure may be the network's, or the engine's."""
    if canary.trouble.strikes.get(target.id, 0) >= CANARY_STRIKES:
        return f"the canary {canary.id} did not survive it: {canary.reason or 'its contents were unknown twice'}"
    if canary.state is EngineState.NACKED and canary.trouble.failures >= GIVE_UP_AFTER:
        return f"the canary {canary.id} refused it {canary.trouble.failures} times: {canary.reason}"
    return None


def is_through(strategy: Strategy, target: VersionRecord, update: UpdateRecord) -> bool:
    """Whether an update waits for engines' loads alone, and for no check of a canary."""
    if strategy.name is not StrategyName.CANARY or target.served_at is not None:
        return True
    return _checked(update, target) is CheckState.PASSED


def awaits_check(
    strategy: Strategy, target: VersionRecord, update: UpdateRecord | None, engines: Sequence[EngineRecord]
) -> EngineRecord | None:
    """The canary, once it serves the target and its check is not done."""
    if strategy.name is not StrategyName.CANARY or target.served_at is not None:
        return None
    if _checked(update, target) is not CheckState.PENDING:
        return None
    canary = canary_of(strategy, target, engines)
    return canary if canary is not None and canary.known and canary.serving == target.id else None


def _checked(update: UpdateRecord | None, target: VersionRecord) -> CheckState | None:
    return update.check if update is not None and update.version == target.id else None


def finished_first(strategy: Strategy, update: UpdateRecord | None, engines: Iterable[EngineRecord]) -> str | None:
    """The version whose update ends before a newer one starts, so that a fast trainer cannot starve it.

    None for one that an engine fails again and again, or has given up, or about which engines contradict each other: a
    newer version may mend that. Nor where one waits for its own operator, or is a host that does not obey: it takes a
    newer one, where this service has lost what it knew.
    """
    if strategy.name is StrategyName.ALL or update is None or update.state is not UpdateState.ROLLING:
        return None
    engines = list(engines)
    if not engines:
        return None  # the engines of this update follow another run now
    if any(engine.pulls and engine.state is EngineState.CONTESTED for engine in engines):
        return None
    reached = [engine for engine in engines if not engine.state.is_out_of_reach]
    if any(engine.waits is not None and engine.serving != update.version for engine in reached):
        return None
    if any(engine.doubted is not None for engine in reached):
        return None
    worst = max((max(e.trouble.failures, e.trouble.strikes.get(update.version, 0)) for e in reached), default=0)
    return None if worst >= GIVE_UP_AFTER else update.version


def why_waiting(strategy: Strategy, target: VersionRecord, engines: Sequence[EngineRecord]) -> str:
    """What an engine that is not released waits for, as the end of a sentence."""
    if strategy.name is StrategyName.CANARY:
        canary = canary_of(strategy, target, engines)
        if canary is None:
            return "no engine can be the canary"
        if canary.waits is not None and canary.serving != target.id:
            return f"the canary {canary.id} goes first, and waits: {canary.waits}"
        return f"the canary {canary.id} goes first and is checked"
    out = sorted(f"{engine.id} ({engine.state})" for engine in engines if engine.state.is_out_of_service)
    return f"at most {strategy.max_unavailable} may be out of service, and {', '.join(out) or 'others'} are first"
