"""Why a version is where it is: its state, its files, which engines serve it and where the others are.

Engines have a sentence each, or one for many that are alike.
"""

from collections.abc import Iterable, Iterator, Mapping

from refitd.engine.port import Outcome
from refitd.explain.hosts import host_words
from refitd.explain.present import (
    left_on_barred,
    of_upstream,
    orders_of_hosts,
    upstream_of,
)
from refitd.policy.contest import SAID_FOR, STOP_THE_OTHER, gives_up
from refitd.policy.goals import is_here, passed_over, question_about
from refitd.policy.roster import why_unbound
from refitd.policy.strategy import Strategy, has_given_up, released, why_waiting
from refitd.state.records import NOT_SENT, AttemptRecord, EngineRecord, Source, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import FEW, capitalized, listed
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

_VERSIONS: Mapping[VersionState, str] = {
    VersionState.ANNOUNCED: "its files have not been looked at yet",
    VersionState.SETTLING: "it is being written, as far as its files tell",
    VersionState.VALIDATING: "its files are being checked",
    VersionState.SEALED: "its files were checked and are good",
    VersionState.RETIRED: "it is not needed: its files are being deleted",
    VersionState.DELETED: "its files were deleted",
    VersionState.REJECTED: "its files are not good, and no engine loads it",
    VersionState.UNKNOWN: "its files could not be read: this is tried again",
    VersionState.LOST: "its files have changed or gone since they were checked",
}

_DESCRIBED = (
    "Its trainer wrote no refit.json. The service keeps one: engines with refitd inside load it as they load a version "
    "of the SDK."
)


def explain_version(
    record: VersionRecord,
    store: Store,
    targets: Targets,
    plan: ReclaimPlan,
    waits_for: str | None = None,
    *,
    never_sent: bool = False,
) -> Iterator[str]:
    """Explain what state a version is in and why, which engines serve it, whether it is kept.

    `plan` is what would be collected now, `waits_for` why no copy of a delta is being written now. `never_sent`: it is
    known that no engine was ever brought to it.
    """
    has_no_files = record.durability is not None and record.state is VersionState.ANNOUNCED
    means = "it has no files" if has_no_files else _VERSIONS[record.state]
    yield f"{record.id} is {record.state}: {record.doubt or record.reason or means}."
    yield from _about_files(record, targets)
    yield from _about_bars(record, store)
    if record.kind is Kind.DELTA:
        yield from _as_delta(record, targets, waits_for)
    if record.state.may_be_target or record.in_memory:
        yield from on_engines(record, store, targets)
        if (newer := overtaken_by(record, store, targets)) is not None:
            step = f"step {newer.order.step:,}" if newer.order.generation == record.order.generation else newer.id
            partly = "Not all engines of its run were proved to serve it"
            yield f"{'No engine was ever brought to it' if never_sent else partly}: {step} overtook it."
    if record.career.timings:
        yield f"Its update took: {phases(record.career.timings)}."
    for line in plan.items:
        if line.version == record.id:
            yield from (f"It is {'kept' if line.keep else 'due to be deleted'}: {reason}." for reason in line.reasons)
            yield from _on_disk(line, plan)


def _about_files(record: VersionRecord, targets: Targets) -> Iterator[str]:
    if record.chosen is not None:
        yield f"Its trainer publishes it {record.chosen}."
    if record.in_memory:
        yield f"It was handed over from its trainer's memory. {without_files(record, targets)}"
    if record.verdict.proved_by:
        engines = listed(record.verdict.proved_by)
        yield f"Its tensors were proved by the GPUs of {engines}, and not read by the service itself."
    if record.partly:
        yield f"It {record.partly}."
    yield from (f"About its files: {note}." for note in record.verdict.notes)
    if record.files.described:
        yield _DESCRIBED


def _about_bars(record: VersionRecord, store: Store) -> Iterator[str]:
    """Say that no engine goes to it any more, and by whose doing."""
    if record.career.given_up is not None:
        is_wanted = store.runs.upstream is not None and store.runs.desired.get(record.run) == record.id
        once_more = "; its upstream wants it: a resync of an engine tries it once more" if is_wanted else ""
        yield f"It was given up here: engines do not go to it again{once_more}."
    elif record.barred and not record.was_never_served:
        yield "It was rolled back from: engines do not go to it again."


def _on_disk(line: Reclaimable, plan: ReclaimPlan) -> Iterator[str]:
    """Say what its folder takes, and whether that counts."""
    if line.bytes:
        yield f"Its folder takes {line.bytes:,} bytes."
        if line.foreign_bytes:
            yield f"Of them {line.foreign_bytes:,} are not refitd's to delete, and count in no disk budget."
        if plan.disk_budget is not None:
            yield f"All that is kept takes {plan.kept_bytes:,} of the disk budget of {plan.disk_budget:,} bytes."


def without_files(record: VersionRecord, targets: Targets) -> str:
    """Say what a restart or a rollback leads to while a version has no files."""
    good = targets.of_run(record.run).last_good
    leads = "no version, since none was good before" if good is None else good.id
    if record.durability is not None and record.state.is_open:
        lack = f"It has no files, and gets none where all engines have it (durable={record.durability}):"
    else:
        lack = "It has no good files yet: until it has," if record.state.is_open else "It has no good files:"
    return f"{lack} a restart of an engine or a rollback leads to {leads}."


def _as_delta(record: VersionRecord, targets: Targets, waits_for: str | None) -> Iterator[str]:
    yield f"It is a delta on {record.base}."
    path, refused = targets.carriage.path_of(record), targets.carriage.refused.get(record.id)
    if path is not None:
        yield f"Engines load it from {path}."
    elif refused is not None:
        yield f"It cannot be carried out: {refused}. Publish a full version."
    elif waits_for is not None:
        yield f"It waits for a copy that engines can load: {waits_for}."


def on_engines(record: VersionRecord, store: Store, targets: Targets) -> Iterator[str]:
    """Say how a version's update stands, which engines serve it and which do not yet."""
    goals, engines = targets.of_run(record.run), store.engines_of(record.run)
    target, is_target = goals.target, goals.target is not None and goals.target.id == record.id
    if target is not None and not is_target:
        yield f"The target of run {record.run} is {target.id}."
        if passed_over(store.versions_of(record.run), target) == record:
            yield f"{capitalized(question_about(record, target))}."
    if not engines:
        is_closed = record.run in store.runs.closed
        rest = ", which is closed." if is_closed else f": 'refitd explain {record.run}' says what to do."
        yield f"No engine follows run {record.run}{rest}"
    update = store.updates.get(record.run)
    if update is not None and update.version == record.id:
        why = "" if update.reason is None else f": {update.reason}"
        if record.barred and target is None:
            yield f"Its update has ended, and there is no good version to go back to{why}."
        elif why:
            yield f"Its update is {update.state}{why}."
    is_next = is_target or (target is not None and is_here(record, target))
    if update is not None and update.paused_since is not None and is_next:
        yield paused_since(update)
    yield from _serving([engine for engine in engines if engine.serving == record.id])
    if is_target and record.state is VersionState.LOST:
        yield f"{capitalized(what_is_left(goals.loadable))}: publish the next step."
    elif is_target:
        yield from _late([engine for engine in engines if engine.serving != record.id], store)


def what_is_left(loadable: VersionRecord | None) -> str:
    """Say what engines load that do not serve a target whose files are lost, as a clause."""
    others = "an engine that does not serve it"
    return f"{others} has nothing left to load" if loadable is None else f"{others} is brought to {loadable.id}"


def overtaken_by(record: VersionRecord, store: Store, targets: Targets) -> VersionRecord | None:
    """Return the run's target where it is newer than a good version that was not served."""
    target = targets.of_run(record.run).target
    if target is None or target.order <= record.order or record.barred or record.served_at is not None:
        return None
    is_held = any(engine.serving == record.id for engine in store.engines.values())
    return None if is_held or record.state is not VersionState.SEALED else target


def _serving(engines: Iterable[EngineRecord]) -> Iterator[str]:
    """Say which engines serve a version: in one sentence where they are many."""
    seen, away = list[EngineRecord](), list[EngineRecord]()
    for engine in engines:
        (away if engine.state is EngineState.UNREACHABLE else seen).append(engine)
    for group, claim in ((seen, "serve it"), (away, "served it when they were last reached")):
        if len(group) > FEW:
            yield f"{len(group):,} engines {claim}: {listed([engine.id for engine in group])}."
        else:
            yield from (f"Engine {engine.id} {engine.serves('it')}." for engine in group)


def _late(engines: Iterable[EngineRecord], store: Store) -> Iterator[str]:
    """Say which engines do not serve a run's target yet, and what they do: in one sentence for many in one state."""
    states: dict[EngineState, list[EngineRecord]] = {}
    for engine in engines:
        states.setdefault(engine.state, []).append(engine)
    for state, group in states.items():
        does = orders_of_hosts(group, store)
        if len(group) <= FEW:
            yield from (f"Engine {engine.id} does not serve it yet: {_where(engine, does)}." for engine in group)
            continue
        whys = ((engine.id, does.get(engine.id) or engine.reason) for engine in group)
        why = next((f" ({name}: {why})" for name, why in whys if why), "")
        held = {engine.serving for engine in group if state is not EngineState.UNREACHABLE}
        serve = f" and serve {held.pop()}" if len(held) == 1 and None not in held else ""
        ids = listed([engine.id for engine in group])
        yield f"{len(group):,} engines do not serve it yet; they are {state}{serve}{why}: {ids}."


def _where(engine: EngineRecord, does: Mapping[str, str]) -> str:
    """Say what an engine does instead of serving a version. `does` has that of hosts."""
    reason = does.get(engine.id) or engine.reason
    why = f" ({reason})" if reason else ""
    return f"it is {engine.state}{why}, and {engine.serves(contents_of(engine))}"


def contents_of(engine: EngineRecord) -> str:
    """Say what an engine has, whether or not that is a version."""
    unproven = engine.of_others or "its start-up weights" if engine.known else "unknown contents"
    return engine.serving or unproven


def paused_since(update: UpdateRecord) -> str:
    return f"Updates of run {update.run} are paused since {update.paused_since}: 'refitd resume {update.run}'."


def phases(timings: Mapping[str, float]) -> str:
    """How long each phase took. Of a version, phases of loads are those of the engine that took longest."""
    return ", ".join(f"{stage.replace('_', ' ')} {milliseconds:,.0f} ms" for stage, milliseconds in timings.items())


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
    EngineState.QUARANTINED: "it could not be repaired, and is left alone until it is restarted or resynced",
    EngineState.CONTESTED: "another writer loads weights into it: nothing is loaded for a while, in the end not at all",
}

_SOURCES = {
    Source.SETTINGS: "--engine",
    Source.FILE: "the engines file",
    Source.API: "who added it",
    Source.DISCOVERED: "where it was found",
    Source.REPORTED: "its own report",
}


def explain_engine(engine: EngineRecord, store: Store, targets: Targets) -> list[str]:
    sentences, why = list(_about_engine(engine, store, targets)), engine.reason
    update = store.updates.get(engine.run or "")
    if why is None or any(why in each for each in sentences) or (update is not None and why == update.why_paused):
        return sentences
    return [sentences[0], f"The reason: {why}.", *sentences[1:]]


def _about_engine(engine: EngineRecord, store: Store, targets: Targets) -> Iterator[str]:
    order = store.loading.get(engine.id)
    left = left_on_barred(engine, store, targets)
    yield f"{engine.id} is {engine.state}: {_what_it_means(engine, order) if left is None else f'it {left}'}."
    if engine.debts.reload and engine.state.is_away:
        yield "A resync was asked for: it will be loaded again when it is reachable."
    if engine.run is None:
        yield f"It follows no run: {why_unbound(set(store.index.runs) - store.runs.closed.keys())}."
        return
    target = targets.of_run(engine.run).target
    yield _against(engine, engine.run, target)
    yield from _about_its_run(engine, engine.run, store)
    held = store.versions.get(engine.serving or "")
    if held is not None and held.in_memory:
        yield f"It has that from its trainer's memory. {without_files(held, targets)}"
    if target is not None and engine.serving != target.id:
        yield from _turn(engine, target, store, targets.strategy)
    yield from _trouble(engine)
    yield from _its_server(engine, target)
    yield from host_words().about(engine, order, store, targets)
    if engine.trouble.last_attempt is not None:
        yield _last_load(engine.trouble.last_attempt)


def _about_its_run(engine: EngineRecord, run: str, store: Store) -> Iterator[str]:
    if engine.naming.moved:
        named = "names no run" if engine.naming.said is None else f"names run {engine.naming.said}"
        yield f"It was moved to run {run}; {_SOURCES[engine.naming.source]} {named}."
    if run in store.runs.closed:
        yield f"Run {run} is closed: 'refitd engines move {engine.id} --run RUN' gives it another."
    if (waits := of_upstream(engine, store)) is not None:
        yield f"{waits}."
    if (word := upstream_of(store, run)) is not None:
        yield from (*word.about_pulls(), *word.last_report(store.clock.monotonic()))


def _trouble(engine: EngineRecord) -> Iterator[str]:
    trouble = engine.trouble
    if not engine.known:
        yield "It is paused, and stays so until a full load was proved by its contents."
    if engine.debts.resume_owed and engine.known:
        yield "It may still be paused: refitd asks it to resume until it answers."
    if trouble.taken is None and trouble.contests and not engine.pulls:  # a host says itself why it does not obey
        yield _fought_over(engine)
    if trouble.failures:
        failed = "1 attempt has" if trouble.failures == 1 else f"{trouble.failures} attempts in a row have"
        yield f"{failed} failed; the next one waits a while."


def _what_it_means(engine: EngineRecord, order: AttemptRecord | None) -> str:
    if engine.seen.host is not None and engine.state is EngineState.UPDATING and order is not None:
        return f"it was ordered to serve {order.version}"
    if engine.pulls and engine.state is EngineState.CONTESTED:
        return "the host does not do what this service says"
    if engine.pulls and engine.state is EngineState.UNREACHABLE:
        return "the host does not report, and is brought up to date when it does"
    return _ENGINE_MEANINGS[engine.state]


def _its_server(engine: EngineRecord, target: VersionRecord | None) -> Iterator[str]:
    """Say what its server is, what proves its contents, and what carries out its loads."""
    seen = engine.seen
    if engine.what_it_is:
        yield f"It {engine.what_it_is}."
    if engine.how_proved is not None:
        yield engine.how_proved
    if seen.plugin is not None or seen.stock_reason is not None:
        yield f"It {engine.how_it_loads}."
    if seen.plugin is not None and target is not None and target.lacks_manifest:
        why = "that has no manifest, and the service keeps none"
        yield f"It loads {target.id} as {seen.server} does by itself: {why}."
    if engine.naming.pair:
        yield f"Its servers are updated together: {', '.join(engine.urls)}."
    if seen.draft is not None:
        yield f"Its draft model is {seen.draft}."


def _fought_over(engine: EngineRecord) -> str:
    """Say what is known of another writer, and what ends that."""
    times = "once" if engine.trouble.contests == 1 else f"{engine.trouble.contests} times"
    counted = f"Another writer has changed its weights or its label {times} lately."
    if gives_up(engine):
        resync = f"then 'refitd engines resync {engine.id}'"
        return f"{counted} Nothing more is loaded into it: {STOP_THE_OTHER}, {resync}."
    is_over, waits = engine.trouble.contest is None, "is loaded again, after a longer wait each time"
    return f"{counted} It {'was loaded again since' if is_over else waits}: {STOP_THE_OTHER}; {SAID_FOR}."


def _against(engine: EngineRecord, run: str, target: VersionRecord | None) -> str:
    """Say what an engine serves, and what it should serve."""
    serves = engine.serves(contents_of(engine))
    if target is None:
        return f"It {serves}; run {run} has no target yet."
    if engine.serving == target.id:
        return f"It {serves}; that is the target of run {run}."
    return f"It {serves}; the target of run {run} is {target.id}."


def _last_load(attempt: AttemptRecord) -> str:
    why = f": {attempt.reason}" if attempt.reason else ""
    ended = _ENDED.get(attempt.outcome or "", "is under way")
    took = f" It took: {phases(attempt.timings)}." if attempt.timings else ""
    return f"Its last load, of {attempt.version}, began at {attempt.started_at} and {ended}{why}.{took}"


def _turn(engine: EngineRecord, target: VersionRecord, store: Store, strategy: Strategy) -> Iterator[str]:
    update, engines = store.updates.get(target.run), store.engines_of(target.run)
    if update is not None and update.paused_since is not None:
        yield paused_since(update)
    elif has_given_up(engine, target):
        loads = engine.trouble.strikes[target.id]
        yield f"It has given {target.id} up after {loads} loads: a resync tries it once more."
    elif engine.id not in released(strategy, target, update, engines):
        yield f"It is not its turn yet: {why_waiting(strategy, target, engines)}."
        if update is not None and update.version == target.id and update.reason is not None:
            yield f"The update is {update.state}: {update.reason}."
