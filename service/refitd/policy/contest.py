"""Another writer: an engine whose weights have changed, neither by this service nor by a restart. Pure.

    restarted       another process answers, or an engine that was away names its start-up model: it is loaded at once
    another writer  the process is the same, or it names a model that no start gives it. It is loaded at once, then
                    after waits, then not at all: two services that both insist would pause the engine for ever
    unexplained     the server says nothing of its process, and names its start-up model: once in a while a restart,
                    again within `CALM_PROBES` another writer

SGLang tells its process by a random seed, unless the operator gives one, and from 0.5.23 on by the times of its start.

Two entries may name one server, as `localhost` and `127.0.0.1`. `twin_of` compares the addresses that connections go to
and the processes there, since a proxy may have several servers behind one address. One entry loads the server.
"""

from collections.abc import Iterable
from enum import Enum, auto

from refitd.engine.port import Reached, Unreached
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState

WAITS = (0.0, 5.0, 30.0)  # probe intervals before each load against another writer; after these, none

CALM_PROBES = 300.0  # probe intervals without another change, after which earlier ones are forgotten

STOP_THE_OTHER = (
    "stop the other writer (another refitd with this engine, or a trainer or a script that updates it)"  # what to do
)

SAID_FOR = (
    f"this is said for {CALM_PROBES:g} probe intervals after the last change, 10 minutes unless --probe-interval is set"
)


class Cause(Enum):
    """Why an engine does not serve what it was proved to serve."""

    RESTARTED = auto()
    ANOTHER_WRITER = auto()
    UNEXPLAINED = auto()


def cause_of(engine: EngineRecord, seen: Reached) -> Cause:
    """Decide. `engine` is the record before the probe that saw the change."""
    same = seen.process.is_as(engine.process)
    if same is False or seen.pulls:  # what a host's engines serve is changed by its own service, as after a restart
        return Cause.RESTARTED
    startup = seen.startup_path or engine.seen.startup_path
    if startup is not None and seen.model_path != startup:
        return Cause.ANOTHER_WRITER
    # A seed that the operator gives is the same after a restart.
    if engine.state.is_away and (same is None or seen.process.started is None):
        return Cause.RESTARTED
    return Cause.UNEXPLAINED if same is None else Cause.ANOTHER_WRITER


def changed(before: EngineRecord, engine: EngineRecord, seen: Reached, path: str | None, now: float) -> EngineRecord:
    """The record of an engine that serves something else than it was proved to serve.

    Args:
        engine: the same with what the probe saw.
        path: what the engine was expected to name, None where that is not known.
    """
    cause, was = cause_of(before, seen), before.serving or before.contents.model_path
    kept = "" if cause is Cause.ANOTHER_WRITER else None
    engine = engine.having(serving=None, beneath=None, wants_full=False, failures=0, kept=kept)
    serves = f"serves {seen.model_path} as {seen.weight_version!r} and no longer {was}"
    if seen.pulls:
        reason = f"not all of the host's engines are proved to serve {was} any more"
        was_at = before.serving or before.contents.held
        return engine.having(reason=reason, held=was_at, contest=None, contests=0, contested_at=None)
    if cause is Cause.RESTARTED:
        return engine.having(reason=f"{serves}: it was restarted", contest=None, contests=0, contested_at=None)
    if cause is Cause.UNEXPLAINED and before.trouble.contested_at is None:
        reason = f"{serves}: it was restarted, as far as can be told: the server tells nothing of its process"
        return engine.having(reason=reason, contested_at=now)
    contest = _told(seen, path, cause)
    return engine.having(reason=contest, contest=contest, contests=before.trouble.contests + 1, contested_at=now)


def still_changed(before: EngineRecord, engine: EngineRecord, seen: Reached) -> EngineRecord:
    """The record of an engine that was not loaded since another writer changed it."""
    is_renamed = (before.contents.model_path, before.contents.weight_version) != (seen.model_path, seen.weight_version)
    if not is_renamed and seen.process.is_as(before.process) is not False:
        return engine
    if (cause := cause_of(before, seen)) is Cause.RESTARTED:
        reason = f"serves {seen.model_path} as {seen.weight_version!r}: it was restarted"
        return engine.having(reason=reason, contest=None, contests=0, contested_at=None)
    return engine.having(contest=_told(seen, None, cause))


def refused(engine: EngineRecord, reason: str, now: float) -> EngineRecord:
    """The record of an engine that refuses this service's loads, since another service leads it."""
    return engine.having(contest=reason, contests=max(engine.trouble.contests + 1, 2), contested_at=now)


def calmed(engine: EngineRecord, now: float, interval: float) -> EngineRecord:
    """The record of an engine that serves what it should: changes by another writer are forgotten after a while."""
    if engine.trouble.contested_at is None or now - engine.trouble.contested_at < CALM_PROBES * interval:
        return engine
    return engine.having(contests=0, contested_at=None)


def held(engine: EngineRecord, target: str | None, now: float, interval: float) -> EngineRecord:
    """The same engine, CONTESTED where nothing is to be loaded into it now. `target` is what it is to serve."""
    if engine.trouble.taken is not None:
        return engine.having(state=EngineState.CONTESTED, reason=engine.trouble.taken)
    if engine.trouble.contest is None or not engine.known:
        return engine
    if gives_up(engine):
        advice = f"{STOP_THE_OTHER}, then 'refitd engines resync {engine.id}'"
        reason = f"{engine.trouble.contest}; nothing more is loaded: {advice}"
        return engine.having(state=EngineState.CONTESTED, reason=reason)
    last, waited = engine.trouble.last_attempt, now - (engine.trouble.contested_at or now)
    if engine.pulls and last is not None and last.version != target:
        return engine  # what a host has refused says nothing of another version
    nothing_to_load = engine.state is EngineState.IN_SYNC
    if nothing_to_load or waited < WAITS[min(max(engine.trouble.contests, 1), len(WAITS)) - 1] * interval:
        why = (
            engine.trouble.contest if engine.pulls else f"{engine.trouble.contest}: {STOP_THE_OTHER}"
        )  # a host says what helps
        return engine.having(state=EngineState.CONTESTED, reason=why)
    return engine


def gives_up(engine: EngineRecord) -> bool:
    """Whether nothing is loaded into it until a restart or a resync. An order that a host does not obey pauses no
    engine, so hosts get the order again and again.
    """
    return engine.trouble.contest is not None and engine.trouble.contests > len(WAITS) and not engine.pulls


def forgiven(engine: EngineRecord) -> EngineRecord:
    return engine.having(contest=None, contests=0, contested_at=None)


def _told(seen: Reached, path: str | None, cause: Cause) -> str:
    what = f"{seen.model_path} as {seen.weight_version!r}"
    if seen.model_path == path:
        return f"another writer has set its label: it names {what}"
    if cause is Cause.UNEXPLAINED:
        return f"another writer loads {what}, or it restarts again and again: the server tells nothing of its process"
    return f"another writer loads {what}"


def twin_of(engine: EngineRecord, seen: Reached, engines: Iterable[EngineRecord]) -> str | None:
    """The sentence that another entry loads the server that a probe has reached; None where this entry does.

    The entry that serves something loads it, else the first by name.
    """
    for other in engines:
        if other.id == engine.id or other.state.is_away or other.trouble.taken is not None:
            continue
        if _is_one(seen, other) and _rank(other) < _rank(engine):
            names = f"{other.id} ({other.url})"
            return f"{engine.url} is the server of engine {names}, which loads it: take one of the two names out"
    return None


def is_one_server(one: Reached | Unreached, other: Reached | Unreached) -> bool:
    return isinstance(one, Reached) and isinstance(other, Reached) and _is_one(one, other)


def _is_one(one: Reached, other: Reached | EngineRecord) -> bool:
    return one.address is not None and one.address == other.address and one.process.is_as(other.process) is not False


def _rank(engine: EngineRecord) -> tuple[bool, str]:
    return (engine.serving is None, engine.id)
