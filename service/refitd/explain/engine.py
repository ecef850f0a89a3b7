"""Why an engine is where it is: what it serves, what it should serve, and what it waits for."""

from collections.abc import Mapping

from refitd.engine.port import Outcome
from refitd.explain.present import host_does, left_on_barred, of_upstream, unknown_on_host, upstream_of
from refitd.explain.version import contents_of, paused_since, phases, without_files
from refitd.policy.binding import why_unbound
from refitd.policy.contest import SAID_FOR, STOP_THE_OTHER, gives_up
from refitd.policy.strategy import Strategy, has_given_up, released, why_waiting
from refitd.policy.upstream import last_report, without_store
from refitd.state.records import NOT_SENT, AttemptRecord, EngineRecord, Source, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.hosts import HostEngine, HostEngines
from refitd_client.contract.states import EngineState

_ENDED: Mapping[str, str] = {
    Outcome.ACK.name: "went well",
    Outcome.NACK.name: "was refused, which left it as it was",
    Outcome.TAINTED.name: "broke off in the middle, which left unknown contents",
    Outcome.UNREACHABLE.name: "has no answer: it could not be reached, or nothing was heard of it any more",
    NOT_SENT: "did not come about: nothing was sent",
}

_ENGINE_MEANINGS: Mapping[EngineState, str] = {
    EngineState.PROBING: "it has not answered yet",
    EngineState.IN_SYNC: "it serves what it should",
    EngineState.BEHIND: "it serves something older than it should",
    EngineState.UPDATING: "it loads a version",
    EngineState.VERIFYING: "it has loaded a version, and its contents are being checked",
    EngineState.NACKED: "it refused the version, and is proved to serve what it served before",
    EngineState.TAINTED: "its contents are unknown",
    EngineState.UNREACHABLE: "it does not answer, is asked again and again, and is brought up to date when it does",
    EngineState.QUARANTINED: (
        "it could not be repaired, and is left alone until it is restarted or a resync is asked for"
    ),
    EngineState.CONTESTED: (
        "another writer loads weights into it, so nothing is loaded for a while, and in the end not at all"
    ),
}

_SOURCES = {
    Source.SETTINGS: "--engine",
    Source.FILE: "the engines file",
    Source.API: "who added it",
    Source.DISCOVERED: "where it was found",
    Source.REPORTED: "its own report",
}


def explain_engine(engine: EngineRecord, store: Store, targets: Targets) -> list[str]:
    """Explain what an engine serves, what it should serve, and what it waits for.

    Args:
        engine: the engine.
        store: what the service knows.
        targets: what engines are to serve.
    """
    order = store.loading.get(engine.id)
    left = left_on_barred(engine, store, targets)
    means = _what_it_means(engine, order) if left is None else f"it {left}"
    sentences = [f"{engine.id} is {engine.state}: {means}."]
    if engine.reload and engine.state.is_away:
        sentences.append("A resync was asked for: it will be loaded again when it is reachable.")
    if engine.run is None:
        runs = set(store.index.runs) - store.runs.closed.keys()
        return _with_reason([*sentences, f"It follows no run: {why_unbound(runs)}."], engine, None)
    target = targets.of_run(engine.run).target
    sentences.append(_against(engine, engine.run, target))
    sentences += _about_its_run(engine, store)
    sentences += [] if (waits := of_upstream(engine, store)) is None else [f"{waits}."]
    if (word := upstream_of(store, engine.run)) is not None:
        sentences += [*without_store(word.store_fault), *last_report(word, store.clock.monotonic())]
    held = store.versions.get(engine.serving or "")
    if held is not None and held.in_memory:
        sentences.append(f"It has that from its trainer's memory. {without_files(held, targets)}")
    if target is not None and engine.serving != target.id:
        sentences += _turn(engine, target, store, targets.strategy)
    if not engine.known:
        sentences.append("It is paused, and stays so until a full load was proved by its contents.")
    if engine.resume_owed and engine.known:
        sentences.append("It may still be paused: it is told to resume until it answers.")
    sentences += _fought_over(engine)
    if engine.failures:
        failed = "1 attempt has" if engine.failures == 1 else f"{engine.failures} attempts in a row have"
        sentences.append(f"{failed} failed; the next one waits a while.")
    sentences += _its_server(engine, target)
    sentences += [] if engine.host is None else _its_host(engine, engine.host, order, host_does(engine, store))
    sentences += [] if (has := unknown_on_host(engine, store, targets)) is None else [f"The host {has}."]
    if engine.last_attempt is not None:
        sentences.append(_last_load(engine.last_attempt))
    return _with_reason(sentences, engine, store.updates.get(engine.run))


def _what_it_means(engine: EngineRecord, order: AttemptRecord | None) -> str:
    if engine.host is not None and engine.state is EngineState.UPDATING and order is not None:
        return f"it was ordered to serve {order.version}"
    if engine.pulls and engine.state is EngineState.CONTESTED:
        return "the host does not do what this service says"
    if engine.pulls and engine.state is EngineState.UNREACHABLE:
        return "the host does not report, and is brought up to date when it does"
    return _ENGINE_MEANINGS[engine.state]


def _its_server(engine: EngineRecord, target: VersionRecord | None) -> list[str]:
    """Say what its server is, what proves its contents, and what carries out its loads."""
    sentences = [f"It {engine.what_it_is}."] if engine.what_it_is else []
    if engine.how_proved is not None:
        sentences.append(engine.how_proved)
    if engine.plugin is not None or engine.stock_reason is not None:
        sentences.append(f"It {engine.how_it_loads}.")
    if engine.plugin is not None and target is not None and target.lacks_manifest:
        why = "that has no manifest, and the service keeps none"
        sentences.append(f"It loads {target.id} as {engine.server} does by itself: {why}.")
    if engine.pair:
        sentences.append(f"Its servers are updated together: {', '.join(engine.urls)}.")
    if engine.draft is not None:
        sentences.append(f"Its draft model is {engine.draft}.")
    return sentences


def _its_host(engine: EngineRecord, host: HostEngines, order: AttemptRecord | None, does: str | None) -> list[str]:
    """Say who does what for a host's engines, and which of them are not where they should be, as the host said last.

    Args:
        engine: the host.
        host: what it has said of its engines.
        order: the order that it is carrying out; None where it is carrying out none.
        does: what the host does for its engines now, without a subject; None where that is nothing.
    """
    source = f" from {host.upstream}" if host.upstream else ""
    own = "engine" if host.count == 1 else f"{host.count} engines"
    counted = ", ".join(f"{count} {state}" for state, count in sorted(host.states.items()))
    sentences = [
        f"The host {host.follower} pulls each version{source} and updates its own {own}.",
        "This service only says which version, and waits until the host has proved that it serves it.",
        *([] if does is None else [f"Now the host {does}."]),
        *without_store(host.store_fault),
        f"When the host last reported, its engines were: {counted or 'none'}.",
    ]
    goal = engine.serving if order is None else order.version
    away = [each for each in host.engines if each.state is not EngineState.IN_SYNC or goal not in (None, each.version)]
    sentences += [_not_there(each, goal) for each in away]
    not_named = host.count - host.states.get(EngineState.IN_SYNC, 0)
    not_named -= sum(each.state is not EngineState.IN_SYNC for each in host.engines)
    if not_named > 0:
        others = "1 more of its engines was" if not_named == 1 else f"{not_named} more of its engines were"
        sentences.append(f"{others} not IN_SYNC: 'refitd status' on that host names all of them.")
    return sentences


def _not_there(each: HostEngine, goal: str | None) -> str:
    """Say where an engine of a host is instead, and why."""
    serves = f"it served {each.version or 'no version'}"
    if each.state is EngineState.IN_SYNC:
        return f"Its engine {each.id} was not on {goal} yet: {serves}, and the host had not begun to load it."
    why = f" ({each.reason})" if each.reason else ""
    if goal in (None, each.version):
        return f"Its engine {each.id} was {each.state}{why}; {serves}."
    return f"Its engine {each.id} was not on {goal} yet: it was {each.state}{why}, and {serves}."


def _fought_over(engine: EngineRecord) -> list[str]:
    """Say what is known of another writer, and what ends that."""
    if engine.taken is not None or not engine.contests or engine.pulls:  # a host says itself why it does not obey
        return []
    times = "once" if engine.contests == 1 else f"{engine.contests} times"
    counted = f"Another writer has changed its weights or its label {times} lately."
    if gives_up(engine):
        resync = f"then 'refitd engines resync {engine.id}'"
        return [f"{counted} Nothing more is loaded into it: {STOP_THE_OTHER}, {resync}."]
    again = "was loaded again since" if engine.contest is None else "is loaded again, after a longer wait each time"
    return [f"{counted} It {again}: {STOP_THE_OTHER}; {SAID_FOR}."]


def _about_its_run(engine: EngineRecord, store: Store) -> list[str]:
    sentences: list[str] = []
    if engine.moved:
        named = "names no run" if engine.said is None else f"names run {engine.said}"
        sentences.append(f"It was moved to run {engine.run}; {_SOURCES[engine.source]} {named}.")
    if engine.run in store.runs.closed:
        sentences.append(f"Run {engine.run} is closed: 'refitd engines move {engine.id} --run RUN' gives it another.")
    return sentences


def _with_reason(sentences: list[str], engine: EngineRecord, update: UpdateRecord | None) -> list[str]:
    """Add why its state is what it is, unless another sentence says so."""
    why = engine.reason
    if why is None or any(why in each for each in sentences) or (update is not None and why == update.why_paused):
        return sentences
    return [sentences[0], f"The reason: {why}.", *sentences[1:]]


def _against(engine: EngineRecord, run: str, target: VersionRecord | None) -> str:
    """Say what an engine serves, and what it should serve."""
    serves = engine.serves(contents_of(engine))
    if target is None:
        return f"It {serves}; run {run} has no target yet."
    is_there = engine.serving == target.id
    return f"It {serves}; " + (
        f"that is the target of run {run}." if is_there else f"the target of run {run} is {target.id}."
    )


def _last_load(attempt: AttemptRecord) -> str:
    why = f": {attempt.reason}" if attempt.reason else ""
    ended = _ENDED.get(attempt.outcome or "", "is under way")
    took = f" It took: {phases(attempt.timings)}." if attempt.timings else ""
    return f"Its last load, of {attempt.version}, began at {attempt.started_at} and {ended}{why}.{took}"


def _turn(engine: EngineRecord, target: VersionRecord, store: Store, strategy: Strategy) -> list[str]:
    """Say what the strategy has it wait for."""
    update, engines = store.updates.get(target.run), store.engines_of(target.run)
    if update is not None and update.paused_since is not None:
        return [paused_since(update)]
    if has_given_up(engine, target):
        return [f"It has given {target.id} up after {engine.strikes[target.id]} loads: a resync tries it once more."]
    if engine.id in released(strategy, target, update, engines):
        return []
    sentences = [f"It is not its turn yet: {why_waiting(strategy, target, engines)}."]
    if update is not None and update.version == target.id and update.reason is not None:
        sentences.append(f"The update is {update.state}: {update.reason}.")
    return sentences
