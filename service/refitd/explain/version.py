"""Why a version is where it is: its state, its files, which engines serve it and where the others are.

Engines have a sentence each, or one for many that are alike.
"""

from collections.abc import Iterable, Mapping

from refitd.explain.present import orders_of_hosts
from refitd.policy.goals import passed_over, question_about
from refitd.policy.upstream import is_here
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import FEW, listed
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
) -> list[str]:
    """Explain what state a version is in and why, which engines serve it, whether it is kept.

    Args:
        record: the version.
        store: what the service knows.
        targets: what engines are to serve.
        plan: what would be collected now.
        waits_for: why no copy of a delta is being written now.
        never_sent: it is known that no engine was ever brought to it.
    """
    has_no_files = record.durability is not None and record.state is VersionState.ANNOUNCED
    means = "it has no files" if has_no_files else _VERSIONS[record.state]
    sentences = [f"{record.id} is {record.state}: {record.doubt or record.reason or means}."]
    if record.chosen is not None:
        sentences.append(f"Its trainer publishes it {record.chosen}.")
    if record.in_memory:
        sentences.append(f"It was handed over from its trainer's memory. {without_files(record, targets)}")
    if record.proved_by:
        engines = listed(record.proved_by)
        sentences.append(f"Its tensors were proved by the GPUs of {engines}, and not read by the service itself.")
    sentences += [f"It {record.partly}."] if record.partly else []
    sentences += [f"About its files: {note}." for note in record.notes]
    if record.described:
        sentences.append(_DESCRIBED)
    sentences += _barred(record, store)
    if record.kind is Kind.DELTA:
        sentences += _as_delta(record, targets, waits_for)
    if record.state.may_be_target or record.in_memory:
        sentences += on_engines(record, store, targets)
        if (newer := overtaken_by(record, store, targets)) is not None:
            step = f"step {newer.order.step:,}" if newer.order.generation == record.order.generation else newer.id
            partly = "Not all engines of its run were proved to serve it"
            lacks = "No engine was ever brought to it" if never_sent else partly
            sentences.append(f"{lacks}: {step} overtook it.")
    sentences += [f"Its update took: {phases(record.timings)}."] if record.timings else []
    for line in plan.items:
        if line.version == record.id:
            sentences += [f"It is {'kept' if line.keep else 'due to be deleted'}: {reason}." for reason in line.reasons]
            sentences += _on_disk(line, plan)
    return sentences


def _barred(record: VersionRecord, store: Store) -> list[str]:
    """Say that no engine goes to it any more, and by whose doing."""
    if record.given_up is not None:
        is_wanted = store.runs.upstream is not None and store.runs.desired.get(record.run) == record.id
        again = "; its upstream wants it: a resync of an engine tries it once more" if is_wanted else ""
        return [f"It was given up here: engines do not go to it again{again}."]
    is_left = record.barred and not record.was_never_served
    return ["It was rolled back from: engines do not go to it again."] if is_left else []


def _on_disk(line: Reclaimable, plan: ReclaimPlan) -> list[str]:
    """Say what its folder takes, and whether that counts."""
    if not line.bytes:
        return []
    sentences = [f"Its folder takes {line.bytes:,} bytes."]
    if line.foreign_bytes:
        sentences.append(f"Of them {line.foreign_bytes:,} are not refitd's to delete, and count in no disk budget.")
    if plan.disk_budget is not None:
        budget = f"the disk budget of {plan.disk_budget:,} bytes"
        sentences.append(f"All that is kept takes {plan.kept_bytes:,} of {budget}.")
    return sentences


def without_files(record: VersionRecord, targets: Targets) -> str:
    """Say what a restart or a rollback leads to while a version has no files."""
    good = targets.of_run(record.run).last_good
    leads = "no version, since none was good before" if good is None else good.id
    if record.durability is not None and record.state.is_open:
        lack = f"It has no files, and gets none where all engines have it (durable={record.durability}):"
    else:
        lack = "It has no good files yet: until it has," if record.state.is_open else "It has no good files:"
    return f"{lack} a restart of an engine or a rollback leads to {leads}."


def _as_delta(record: VersionRecord, targets: Targets, waits_for: str | None) -> list[str]:
    sentences = [f"It is a delta on {record.base}."]
    path, refused = targets.carriage.path_of(record), targets.carriage.refused.get(record.id)
    if path is not None:
        sentences.append(f"Engines load it from {path}.")
    elif refused is not None:
        sentences.append(f"It cannot be carried out: {refused}. Publish a full version.")
    elif waits_for is not None:
        sentences.append(f"It waits for a copy that engines can load: {waits_for}.")
    return sentences


def on_engines(record: VersionRecord, store: Store, targets: Targets) -> list[str]:
    """Say how a version's update stands, which engines serve it and which do not yet.

    Args:
        record: the version.
        store: what the service knows.
        targets: what engines are to serve.
    """
    target = targets.of_run(record.run).target
    engines = [engine for engine in store.engines.values() if engine.run == record.run]
    sentences: list[str] = []
    if target is not None and target.id != record.id:
        sentences.append(f"The target of run {record.run} is {target.id}.")
        if passed_over(store.versions_of(record.run), target) == record:
            asked = question_about(record, target)
            sentences.append(f"{asked[0].upper()}{asked[1:]}.")
    if not engines:
        is_closed = record.run in store.runs.closed
        rest = ", which is closed." if is_closed else f": 'refitd explain {record.run}' says what to do."
        sentences.append(f"No engine follows run {record.run}{rest}")
    update = store.updates.get(record.run)
    if update is not None and update.version == record.id:
        sentences += _its_update(record, update, target)
    is_next = target is not None and (record.id == target.id or is_here(record, target))
    if update is not None and update.paused_since is not None and is_next:
        sentences.append(paused_since(update))
    there = [engine for engine in engines if engine.serving == record.id]
    sentences += _serving(there)
    if record.state is VersionState.LOST:
        if target is not None and target.id == record.id:
            left = what_is_left(targets.of_run(record.run).loadable)
            sentences.append(f"{left[0].upper()}{left[1:]}: publish the next step.")
    elif target is not None and target.id == record.id:
        sentences += _late([engine for engine in engines if engine.serving != record.id], store)
    return sentences


def what_is_left(loadable: VersionRecord | None) -> str:
    """Say what engines load that do not serve a target whose files are lost, as a clause.

    Args:
        loadable: the newest version that they can be brought to.
    """
    others = "an engine that does not serve it"
    return f"{others} has nothing left to load" if loadable is None else f"{others} is brought to {loadable.id}"


def overtaken_by(record: VersionRecord, store: Store, targets: Targets) -> VersionRecord | None:
    """Return the run's target where it is newer than a good version that was not served."""
    target = targets.of_run(record.run).target
    if target is None or target.order <= record.order or record.barred or record.served_at is not None:
        return None
    is_held = any(engine.serving == record.id for engine in store.engines.values())
    return None if is_held or record.state is not VersionState.SEALED else target


def _its_update(record: VersionRecord, update: UpdateRecord, target: VersionRecord | None) -> list[str]:
    """Say how a version's own update stands, where there is more to it than the engines."""
    why = "" if update.reason is None else f": {update.reason}"
    if record.barred and target is None:
        return [f"Its update has ended, and there is no good version to go back to{why}."]
    return [f"Its update is {update.state}{why}."] if why else []


def _serving(engines: Iterable[EngineRecord]) -> list[str]:
    """Say which engines serve a version: in one sentence where they are many."""
    seen, away = list[EngineRecord](), list[EngineRecord]()
    for engine in engines:
        (away if engine.state is EngineState.UNREACHABLE else seen).append(engine)
    found: list[str] = []
    for group, claim in ((seen, "serve it"), (away, "served it when they were last reached")):
        if len(group) > FEW:
            found.append(f"{len(group):,} engines {claim}: {listed([engine.id for engine in group])}.")
        else:
            found += [f"Engine {engine.id} {engine.serves('it')}." for engine in group]
    return found


def _late(engines: Iterable[EngineRecord], store: Store) -> list[str]:
    """Say which engines do not serve a run's target yet, and what they do: in one sentence for many in one state."""
    states: dict[EngineState, list[EngineRecord]] = {}
    for engine in engines:
        states.setdefault(engine.state, []).append(engine)
    found: list[str] = []
    for state, group in states.items():
        does = orders_of_hosts(group, store)
        if len(group) <= FEW:
            found += [f"Engine {engine.id} does not serve it yet: {_where(engine, does)}." for engine in group]
            continue
        whys = ((engine.id, does.get(engine.id) or engine.reason) for engine in group)
        why = next((f" ({name}: {why})" for name, why in whys if why), "")
        held = {engine.serving for engine in group if state is not EngineState.UNREACHABLE}
        serve = f" and serve {held.pop()}" if len(held) == 1 and None not in held else ""
        ids = listed([engine.id for engine in group])
        found.append(f"{len(group):,} engines do not serve it yet; they are {state}{serve}{why}: {ids}.")
    return found


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
    """Say since when a run's updates are paused, and what resumes them."""
    return f"Updates of run {update.run} are paused since {update.paused_since}: 'refitd resume {update.run}'."


def phases(timings: Mapping[str, float]) -> str:
    """How long each phase took. Of a version, phases of loads are those of the engine that took longest."""
    return ", ".join(f"{stage.replace('_', ' ')} {milliseconds:,.0f} ms" for stage, milliseconds in timings.items())
