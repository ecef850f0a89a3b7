"""What to do next with one engine. Pure and level-triggered: what is and what should be in, one action out.

It never asks how things came to be as they are, so a restart, a lost reply or a missed event all end in the same place.
An engine has one action at a time; the newest target is looked at again before each.
"""

import random
from dataclasses import dataclass
from typing import assert_never

from refitd.policy.contest import gives_up
from refitd.policy.strategy import has_given_up
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.backoff import backoff
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState, VersionState


@dataclass(frozen=True, slots=True)
class Probe:
    pass


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class RefitTo:
    """Bring the engine to a version: by its files, or from its trainer's memory by the file of an offer."""

    version: VersionRecord
    offer: str | None = None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Have the engine make a version (its id) ready that is still being checked, while it serves."""

    version: str


@dataclass(frozen=True, slots=True)
class CancelPrefetch:
    """Have it close what it made ready: no load will come of that."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do before `until` (monotonic seconds) unless something changes."""

    until: float


Action = Probe | Resume | RefitTo | Prefetch | CancelPrefetch | Rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """When what may be done again (monotonic seconds). `failed` is the version whose load failed last, `ahead` the one
    that the engine was asked to make ready before its load.
    """

    probe_at: float = 0.0
    retry_at: float = 0.0
    resume_at: float = 0.0
    failed: str | None = None
    ahead: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What an engine could be brought to: the run's target, and for repairs the last good version.

    `wanted` is the target unless its files are lost, `loadable` is that unless it waits for a copy; `last_served` is
    the
    last good version, though it may wait for a copy. `recorded` names those whose fingerprint is on record for the
    engine's
    configuration. `offered` is a version that this engine can have from its trainer's memory now; `coming` the id of
    one
    that is still being checked and is made ready meanwhile. `ordered`: an upstream has ordered the target, and engines
    whose
    turn it is go there also from a newer version.
    """

    target: VersionRecord | None = None
    wanted: VersionRecord | None = None
    loadable: VersionRecord | None = None
    last_good: VersionRecord | None = None
    last_served: VersionRecord | None = None
    serving: VersionRecord | None = None
    recorded: frozenset[str] = frozenset()
    offered: RefitTo | None = None
    coming: str | None = None
    ordered: bool = False


def next_action(engine: EngineRecord, goals: Goals, agenda: Agenda, now: float) -> Action:
    match engine.state:
        case EngineState.PROBING | EngineState.UNREACHABLE | EngineState.QUARANTINED:
            return _probe_or_rest(agenda.probe_at, agenda, now)
        case EngineState.CONTESTED:
            owes = engine.debts.resume_owed and engine.known and now >= agenda.resume_at
            return Resume() if owes else _probe_or_rest(agenda.probe_at, agenda, now)
        case EngineState.TAINTED if engine.trouble.taken is not None or gives_up(engine):
            return _probe_or_rest(agenda.probe_at, agenda, now)
        case EngineState.TAINTED:
            return _refit_or_rest(repair_with(engine, goals), agenda, now)
        case (
            EngineState.IN_SYNC | EngineState.BEHIND | EngineState.NACKED | EngineState.UPDATING | EngineState.VERIFYING
        ):
            if goals.offered is not None:
                return goals.offered  # a trainer waits for it
            version = _wanted(engine, goals)
            if (
                engine.debts.resume_owed
                and now >= agenda.resume_at
                and (version is None or _must_wait(version, agenda, now))
            ):
                return Resume()  # whatever it waits for, it generates meanwhile
            return _look(version, goals, agenda) or _refit_or_rest(version, agenda, now)
        case _:
            assert_never(engine.state)


def _wanted(engine: EngineRecord, goals: Goals) -> VersionRecord | None:
    """What an engine with known contents is brought to, None where it stays: never back, but for a rollback, where an
    upstream orders it, or where what it serves was rejected when it was read again. Nor forward, where it is a host
    that
    its own operator has paused.
    """
    if goals.loadable is None or goals.target is None or engine.serving in {goals.target.id, goals.loadable.id}:
        return None
    serving = goals.serving
    if _is_held(engine, serving, goals.loadable) or _waits_where_it_is(engine, goals.loadable, goals.target):
        return None
    if serving is not None and not is_to_be_left(serving) and serving.run == goals.loadable.run:
        is_ordered = goals.ordered and serving.order > goals.target.order  # also by way of what the target stands on
        return None if serving.order > goals.loadable.order and not is_ordered else goals.loadable
    return goals.loadable


def is_to_be_left(version: VersionRecord) -> bool:
    """Whether engines go back from a version. What came from a trainer's memory is good though its files never came."""
    return version.barred or (version.state is VersionState.REJECTED and not version.handed)


def _is_held(engine: EngineRecord, serving: VersionRecord | None, version: VersionRecord) -> bool:
    """Whether it is a host that its own operator has paused, and that would not go to this version."""
    if engine.waits is None or engine.debts.reload:
        return False
    return serving is None or serving.run != version.run or serving.order < version.order


def _waits_where_it_is(engine: EngineRecord, version: VersionRecord, target: VersionRecord) -> bool:
    """Whether a host that waits for its turn has something that is not known here and is newer than this version. It
    refuses to go back as long as nothing newer is ordered. It would obey afterwards, from a version that is known here.
    """
    host = engine.seen.host
    has = None if host is None else parse_version_id(host.unknown or "")
    return version.id != target.id and has is not None and has[0] == version.run and has[1] > version.order


def repair_with(engine: EngineRecord, goals: Goals) -> VersionRecord | None:
    """What an engine with unknown contents is brought to.

    After a load that failed its contents count as proved only against a fingerprint on record, and records come only
    from
    clean loads. So the target if it has one; else the last good version if that has one; else the target, which makes
    the
    first record.

    Where no load has failed, and the service has only stopped in the middle of one, the load to the target is held
    against
    what the engine held before: by way of the last good version the engine would answer from an older step meanwhile. A
    version that has left unknown contents here before is no such target.
    """
    if (
        goals.loadable is not None
        and engine.contents.held is not None
        and goals.loadable.id not in engine.trouble.strikes
    ):
        return goals.loadable
    for version in (goals.loadable, goals.last_good):
        # What it has given up may be refuted by a record of its own that was wrong.
        if version is not None and version.id in goals.recorded and not has_given_up(engine, version):
            return version
    return goals.loadable or goals.last_good


def _look(wanted: VersionRecord | None, goals: Goals, agenda: Agenda) -> Prefetch | CancelPrefetch | None:
    """What is to be loaded now comes first."""
    if wanted is not None or goals.coming == agenda.ahead:
        return None
    return CancelPrefetch() if goals.coming is None else Prefetch(goals.coming)


def _refit_or_rest(version: VersionRecord | None, agenda: Agenda, now: float) -> Action:
    if version is None:
        return _probe_or_rest(agenda.probe_at, agenda, now)
    if _must_wait(version, agenda, now):
        return _probe_or_rest(agenda.retry_at, agenda, now)
    return RefitTo(version)


def _must_wait(version: VersionRecord, agenda: Agenda, now: float) -> bool:
    return version.doubt is not None or (agenda.failed == version.id and now < agenda.retry_at)


def _probe_or_rest(until: float, agenda: Agenda, now: float) -> Action:
    if now >= agenda.probe_at:
        return Probe()
    return Rest(min(until, agenda.probe_at) if until > now else agenda.probe_at)


FIRST_RETRY_SECONDS = 0.5

LONGEST_SECONDS = 30.0

# Looks a second at all engines together, and the longest time between two looks at one engine.
LOOKS_A_SECOND, LONGEST_LOOK_SECONDS = 100.0, 10.0
# A look takes about 2 ms of a processor. A restarted engine serves its start-up model until it is looked at.
LOOKS_AT_REST_A_SECOND, LONGEST_AT_REST_SECONDS = 40.0, 60.0


def until_retry(failures: int, chance: random.Random) -> float:
    """Seconds to wait after `failures` (1 or more) failures in a row."""
    return backoff(failures, FIRST_RETRY_SECONDS, LONGEST_SECONDS, chance.random())


def at_rest(engine: EngineRecord, target: str | None) -> bool:
    """Whether an engine is in sync with the target of its run (an id), where there is one, and owes nothing."""
    is_there = target in (None, engine.serving)  # its record says BEHIND from its task's next turn on
    return engine.state is EngineState.IN_SYNC and is_there and not engine.debts.resume_owed


def until_look(interval: float, engines: int, chance: random.Random, *, rests: bool, arrives: bool = False) -> float:
    """Seconds until the next look at an engine.

    Args:
        interval: seconds that the operator wants between two looks.
        engines: that are as this one: at rest, or not.
        rests: whether the engine is at rest.
        arrives: whether it was otherwise until now. Engines that change together, as in an update, are looked at one
            after the other from then on.
    """
    few = min(engines / LOOKS_A_SECOND, LONGEST_LOOK_SECONDS)
    longer = at_rest_interval(interval, engines) if rests else few
    if longer <= interval:
        return interval
    drawn = chance.random()
    return interval + (longer - interval) * drawn if arrives else longer * (0.8 + 0.4 * drawn)


def at_rest_interval(interval: float, engines: int) -> float:
    """Seconds between two looks at an engine at rest, on average, of so many that the service looks at."""
    return max(interval, min(engines / LOOKS_AT_REST_A_SECOND, LONGEST_AT_REST_SECONDS))
